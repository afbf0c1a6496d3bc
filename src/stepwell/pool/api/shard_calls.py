"""Every call to a shard.

- A call may be repeated after a lost answer.
- Steps travel packed, in both directions.
- `ShardService` implements the Protocol; clients get it typed from `ShardSet.at`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from stepwell.pool.api.curation import AuditEntry, Curation, CurationOutcome
from stepwell.pool.api.leasing import (
    BatchRequest,
    ExactFill,
    GroupOffer,
    LeasedGroups,
    ReadyGroups,
    ReadySummary,
    Settlement,
)
from stepwell.pool.api.pacing import Pacing
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.producing import EndResult, Registration, RewardGiven, SubmitVerdict, TrajectoryRef
from stepwell.pool.api.scoring import Judgement
from stepwell.pool.api.series import SeriesChunk
from stepwell.pool.api.stats import PoolStats
from stepwell.pool.api.watching import ChangesPage, Cursor
from stepwell.steps.columns import Columns
from stepwell.steps.step import Step


class KnowsCall(TrajectoryRef):
    """Is this trajectory registered, and not closed yet? The answer is a bool."""


class AbortCall(TrajectoryRef):
    """The answer is an EndResult."""


@dataclass(frozen=True, slots=True)
class CompleteCall(TrajectoryRef):
    """The answer is an EndResult."""

    reward: float | None


ProducerCall = KnowsCall | Registration | CompleteCall | AbortCall
"""What every rollout calls. These calls share messages."""
ProducerAnswer = bool | EndResult | None


class ShardCalls(Protocol):
    async def plan(self) -> PoolPlan: ...

    # -- producers -----------------------------------------------------------------------------------------------------

    async def answer(self, calls: Sequence[ProducerCall]) -> list[ProducerAnswer | Exception]:
        """One answer for each call, or the exception by which it is refused."""

    async def submit_steps(
        self, steps: Columns, channel: str | None = None, group_size: int | None = None
    ) -> list[SubmitVerdict]: ...

    async def submit_groups(self, steps: Columns, registrations: Sequence[Registration]) -> list[SubmitVerdict]: ...

    async def give_reward(self, reward: RewardGiven) -> bool:
        """True if the reward is kept: for training or, if its trajectory was already shipped, in the archive."""

    async def pacing(self, channel: str) -> Pacing: ...

    # -- consumers -----------------------------------------------------------------------------------------------------

    async def fetch_batch(
        self, request: BatchRequest, timeout: float = 60.0, lease: float | None = None, lease_uid: str = ""
    ) -> LeasedGroups:
        """The requested groups, as soon as they are ready. FetchTimeout says what is missing.

        With a lease, they come back unless they are acknowledged in so many seconds. Without, they count as trained.
        """

    async def take(self, request: BatchRequest, lease: float, lease_uid: str) -> LeasedGroups | None:
        """The requested groups if they are ready now."""

    async def ack(self, lease_uid: str) -> Settlement: ...

    async def nack(self, lease_uid: str) -> Settlement: ...

    async def put_back(self, lease_uid: str) -> Settlement:
        """Return groups that no consumer has seen: this counts as no attempt."""

    async def peek(self, request: BatchRequest) -> ReadySummary: ...

    async def wait_change(self, seen: int, timeout: float) -> None:
        """Return when something may have become ready since state `seen`."""

    async def waiting_for(self, request: BatchRequest) -> str: ...

    async def offers(self, request: ExactFill) -> list[GroupOffer]:
        """Groups that can be part of the batch."""

    async def take_offers(
        self, request: ExactFill, offers: Sequence[GroupOffer], lease_uid: str
    ) -> LeasedGroups | None:
        """None if one of the offered groups is gone."""

    async def fill(self, request: ExactFill, lease_uid: str) -> LeasedGroups | None:
        """The batch from this shard alone; None if there is none now."""

    async def ready_groups(self, channel: str) -> ReadyGroups: ...

    async def clear(self, channel: str) -> int:
        """Drop all groups that are not leased. Returns their number."""

    # -- reward workers ------------------------------------------------------------------------------------------------

    async def wait_unscored(self, timeout: float) -> bool:
        """True as soon as a trajectory lacks a reward; False after `timeout`."""

    async def take_unscored(self, count: int, lease: float, lease_uid: str) -> Columns | None:
        """All steps of up to `count` trajectories that lack a reward. Those not judged in `lease` seconds come back."""

    async def give_judgements(self, judgements: Sequence[Judgement]) -> list[bool]:
        """For each judgement, whether it counted."""

    # -- watchers and people -------------------------------------------------------------------------------------------

    async def curate(self, curation: Curation) -> CurationOutcome: ...

    async def audit(self, limit: int, trajectory_uid: str | None) -> list[AuditEntry]:
        """The last decisions, newest first."""

    async def changes(self, cursor: Cursor, limit: int) -> ChangesPage:
        """Changes since the cursor; all trajectories if the shard has restarted since it gave the cursor."""

    async def series(self, seconds: float) -> SeriesChunk: ...

    async def read(self, uids: Sequence[tuple[str, str]]) -> tuple[Columns, list[int]]:
        """The steps of each (trajectory_uid, prompt_uid), and how many each has."""

    async def stats(self) -> PoolStats: ...

    async def quarantined(self) -> list[Step]:
        """The last quarantined steps, each with its reason."""

    # -- policy version ------------------------------------------------------------------------------------------------

    async def set_policy_version(self, version: int) -> None:
        """Tokens that are sampled from now on come from these weights."""

    async def policy_version(self, other_than: int | None = None, timeout: float = 0.0) -> int:
        """The version now; with `other_than`, as soon as it differs from that, or after `timeout`."""
