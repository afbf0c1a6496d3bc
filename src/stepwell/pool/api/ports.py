"""What rooms need of one another, as Protocols: no room imports another, wiring.py hands the real thing in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from stepwell.pool.api.filling import Backlog, Filled
from stepwell.pool.api.leasing import Leased
from stepwell.pool.api.pacing import Pacing
from stepwell.pool.api.scoring import Judgement
from stepwell.pool.api.stats import PoolStats
from stepwell.pool.api.watching import AuditEntry, Changes, Curated, Curation, Cursor, Series
from stepwell.pool.rules.ingest import Ending, Registration, Reward, Verdict
from stepwell.steps.columns import Columns
from stepwell.steps.step import JsonObject, Step


class PoolPort(Protocol):
    """The DataPool, as a gateway sees it. Every call raises PoolUnavailable rather than wait without end."""

    @property
    def policy_version(self) -> int:
        """The newest version the pool has told of."""

    async def knows(self, trajectory_uid: str, prompt_uid: str) -> bool: ...

    async def register_trajectory(self, wanted: Registration) -> None: ...

    async def submit_steps(
        self, steps: Sequence[Step], *, channel: str | None = None, group_size: int | None = None
    ) -> list[Verdict]:
        """One verdict a step, in order. Safe to repeat: a step is taken once."""

    async def complete_trajectory(self, trajectory_uid: str, prompt_uid: str, reward: float | None) -> Ending: ...

    async def give_reward(self, reward: Reward) -> bool:
        """Whether it is kept: as the reward to train with, or, once the trajectory was handed out, in the archive."""

    async def abort_trajectory(self, trajectory_uid: str, prompt_uid: str) -> Ending: ...

    async def pacing(self, channel: str) -> Pacing: ...

    async def check(self) -> None:
        """Raise PoolUnavailable, with the reason, if the pool cannot be used now."""

    async def follow(self) -> None:
        """Keep `policy_version` fresh, until cancelled."""


class ScoringPort(Protocol):
    """The DataPool, as a reward worker sees it. Every call raises PoolUnavailable rather than wait without end."""

    async def take_unscored(self, count: int, *, lease: float, timeout: float) -> tuple[str, list[list[Step]]] | None:
        """A ticket, and the steps of up to `count` trajectories in order; None if there was none for `timeout`.

        What is not judged within `lease` seconds is offered to others.
        """

    async def give_judgements(self, judgements: Sequence[Judgement]) -> list[bool]:
        """Whether each counted. Safe to repeat."""

    async def check(self) -> None: ...


class DoorPort(Protocol):
    """The DataPool, as the Atropos door sees it. Every call raises PoolUnavailable rather than wait without end."""

    @property
    def policy_version(self) -> int:
        """The newest version the pool has told of."""

    async def submit_groups(self, steps: Sequence[Step], registrations: Sequence[Registration]) -> list[Verdict]:
        """Register trajectories and submit their steps, at once. One verdict a step, in order.

        Safe to repeat: a step is taken once.
        """

    async def submit_columns(self, columns: Columns, registrations: Sequence[Registration]) -> list[Verdict]:
        """The same, packed already. Many groups in one message (`stack`) cost little more than one."""

    async def fill_batch(
        self,
        trajectories: int,
        *,
        channel: str,
        shares: Mapping[str, float],
        lease: float,
        min_exactness: str = "retokenized",
        untrainable: bool = True,
    ) -> Filled | None:
        """The oldest groups with exactly that many trajectories, or nothing (shares: pool/rules/exact_batch.py).

        They come back unless they are acknowledged within `lease` seconds.
        """

    async def ack(self, leased: Leased) -> None:
        """It was delivered. LeaseExpired if that took too long: some of it will be handed out again."""

    async def nack(self, leased: Leased) -> None:
        """It was not delivered: it goes back to the head of the queue."""

    async def backlog(self, channel: str) -> Backlog: ...

    async def clear(self, channel: str) -> int:
        """Drop every group that is not under lease; gives how many there were."""

    async def check(self) -> None: ...

    async def follow(self) -> None: ...


class SightPort(Protocol):
    """The DataPool, as a watcher sees it: the dashboard, an export. Every call raises PoolUnavailable rather than wait
    without end. Looking changes nothing."""

    async def stats(self) -> PoolStats: ...

    async def series(self, *, seconds: float) -> Series:
        """What happened in the last so many seconds; the interval is finer for a short time than for a long one."""

    async def changes(self, cursors: Mapping[str, Cursor], limit: int = 2_000) -> Changes:
        """About so many at most. Without cursors, from the beginning: all that is held and the last that are gone."""

    async def read(self, uids: Sequence[tuple[str, str]]) -> Columns:
        """The steps of those (trajectory_uid, prompt_uid), in order; nothing for what the pool no longer holds."""

    async def curate(self, curation: Curation) -> Curated: ...

    async def audit(self, limit: int = 200, trajectory_uid: str | None = None) -> list[AuditEntry]:
        """The last decisions, newest first."""

    async def check(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRequest:
    """What a reward is computed from. The texts are decoded from the ids, for functions that read."""

    prompt_ids: list[int]
    response_ids: list[int]
    prompt_text: str
    response_text: str
    num_turns: int
    extra_fields: JsonObject = field(default_factory=dict)
    dataset_fields: JsonObject = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RewardScore:
    reward_score: float
    reward_extra_info: JsonObject


class RewardPort(Protocol):
    """A reward worker, as a gateway sees it. A failure is RewardFailed, never a score of zero."""

    async def compute_reward(self, request: RewardRequest) -> RewardScore: ...

    async def check(self) -> None: ...
