"""What people decide about single trajectories, and the record of their decisions."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from stepwell.common.message_format import message, sent

MARKS = "marks"
"""The key of a trajectory's metadata that holds its marks. Trainers and exports read them there."""
BY_A_PERSON = "curation:"
"""The start of the source of a reward that a person gave. The person's name follows."""


@sent
class CurationAction(StrEnum):
    MARK = "mark"
    UNMARK = "unmark"
    REJECT = "reject"
    RELABEL = "relabel"


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Curation:
    """A person's decision about one trajectory."""

    action: CurationAction
    trajectory_uid: str
    prompt_uid: str
    by: str
    """The person's name."""
    why: str = ""
    mark: str = ""
    """For mark and unmark."""
    reward: float | None = None
    """For relabel."""


@sent
class CurationOutcome(StrEnum):
    """What a decision did."""

    DONE = "done"
    UNCHANGED = "unchanged"
    """The trajectory already was as decided."""
    LATE = "late"
    """The trajectory is already trained or dropped; training cannot be undone. An archive keeps a relabelled reward."""
    UNKNOWN = "unknown"


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """The record of one decision. Entries are never changed."""

    at: float
    """Wall-clock seconds."""
    by: str
    action: CurationAction
    trajectory_uid: str
    prompt_uid: str
    outcome: CurationOutcome
    before: str = ""
    """The reward, marks or state before the decision, in words."""
    after: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class AuditPage:
    entries: Sequence[AuditEntry]
    """Newest first."""
    missing: tuple[str, ...] = ()
    """Shards that did not answer. Decisions about their trajectories are not among the entries."""
