"""What gateways tell the pool of the calls that they have under way."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

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
    began_at: float = 0.0
    """By its gateway's clock. Announcements of two gateways may arrive in another order."""


class HeldCalls(NamedTuple):
    """What a gateway knows of its calls."""

    calls: Sequence[CallBegun] = ()
    """All whose steps the pool may lack."""
    missed: int = 0
    """How often the pool has not taken word of a call so far."""
    is_late: bool = False
    """The pool is away, or an answer has waited for some time until the pool knows of its call."""


@message
class Requests(NamedTuple):
    """What a shard asks a gateway for."""

    trajectory_uids: Sequence[str]
    """It sends what it holds of these."""
    pause: float
    """Seconds after which it shows at the latest that it lives. Before, if the shard posts its topic."""
