"""What rooms need of one another, as Protocols: no room imports another, wiring.py hands the real thing in."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from stepwell.core.intake import Ending, Registration, Reward, Verdict
from stepwell.core.pacing import Pacing
from stepwell.core.scoring import Judgement
from stepwell.core.step import JsonObject, Step


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
