"""What gateways tell the pool of the calls that they have under way."""

from dataclasses import dataclass
from enum import StrEnum

from stepwell.common.message_format import message, sent

TELL_CALLS = "@tell-calls"
"""Among the trajectories that a gateway is asked to flush: it tells of all calls whose steps the pool may lack."""


@sent
class Repeats(StrEnum):
    """Which earlier calls a call repeats, of those with its key: their answers were not read."""

    NONE = "none"
    LOST = "lost"
    """Those of gateways that died. Any other may be asked the same on purpose."""
    ALL = "all"


@message
@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call whose answer will be a step of a trajectory."""

    trajectory_uid: str
    prompt_uid: str
    uid: str
    """Also that of its first step."""
    gateway: str = ""
    key: str = ""
    """The same for calls that ask the same; empty if that is not known."""
    repeats: Repeats = Repeats.NONE
