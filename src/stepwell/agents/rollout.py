"""A rollout as an agent gets it, its result, and the counts of many results."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

from stepwell.agents.gateway_client import GatewayClient
from stepwell.agents.outcome import AgentFailure

Sample: TypeAlias = Mapping[str, Any]
"""One entry of a dataset."""

LAST_REWARDS = 200
"""Rewards in the mean."""
ALARM_AMONG, ALARM_SHARE = 100, 0.1
"""An exception is conspicuous if it ended more than this share of so many rollouts."""


class RolloutStatus(StrEnum):
    COMPLETED = "completed"
    ABORTED = "aborted"
    """The infrastructure failed; the pool dropped its steps."""
    EMPTY = "empty"
    """The agent ended without a failure, and no call of it was recorded; the pool removed it."""
    LATE = "late"
    """The pool had shipped or dropped it before it ended."""
    FAILED = "failed"
    """The gateway could not be told that it began or ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutResult:
    status: RolloutStatus
    prompt_uid: str
    trajectory_uid: str
    attempt: int
    channel: str
    reward: float | None = None
    """The agent's return value, or the flow's reward for its failure; None if another part scores the rollout."""
    failure: AgentFailure | None = None
    """How the policy failed; None if it did not."""
    exception: str = ""
    """The type of the exception that ended it; empty if none did, and for the failures that have names."""
    why: str = ""
    """The reason of a failure; empty if there was none."""
    seconds: float = 0.0

    @property
    def is_completed(self) -> bool:
        return self.status is RolloutStatus.COMPLETED


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One trajectory to be made: the agent's argument."""

    base_url: str
    """The base URL for any OpenAI client."""
    api_key: str
    sample: Sample
    prompt_uid: str
    trajectory_uid: str
    attempt: int
    """0 at first; each retry after a failure has the next number."""
    gateway: GatewayClient = field(repr=False)

    async def model(self) -> str:
        return await self.gateway.model()

    async def chat(self, messages: Sequence[Mapping[str, Any]], **wanted: Any) -> dict[str, Any]:
        """The model's next message, for agents without an SDK; `wanted` are further fields of the chat API."""
        body = {"messages": messages, **wanted}
        if "model" not in body:
            body["model"] = await self.model()
        reply = await self.gateway.chat(self.base_url, self.api_key, body)
        return dict(reply["choices"][0]["message"])


@dataclass(slots=True)
class RolloutCounts:
    groups: int = 0
    """Complete groups for training."""
    given_up: int = 0
    """Groups in which a rollout failed after all its retries."""
    rollouts: Counter[str] = field(default_factory=Counter)
    """The number of rollouts by status."""
    failures: Counter[AgentFailure] = field(default_factory=Counter)
    """Failures of the policy; these rollouts are completed."""
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=LAST_REWARDS))
    """The last rewards of rollouts for training."""
    exceptions: Counter[str] = field(default_factory=Counter)
    """Rollouts that an exception ended, completed or not, by its type."""
    last_exceptions: deque[str] = field(default_factory=lambda: deque(maxlen=ALARM_AMONG))
    """The exceptions of the last rollouts; empty for a rollout without one."""
    why: str = ""
    """The last failure."""

    def add(self, result: RolloutResult, *, is_validation: bool) -> None:
        self.rollouts[result.status] += 1
        if result.failure is not None:
            self.failures[result.failure] += 1
        self.last_exceptions.append(result.exception)
        if result.exception:
            self.exceptions[result.exception] += 1
        if result.reward is not None and not is_validation:
            self.rewards.append(result.reward)
        if not result.is_completed:
            self.why = f"{result.status}: {result.why}" if result.why else str(result.status)

    @property
    def alarm(self) -> str:
        """The type of exception that ended more than a tenth of the last rollouts: a fault of the machine that no table
        knows looks like that. Empty if there is none."""
        counts = Counter(filter(None, self.last_exceptions))
        name, count = next(iter(counts.most_common(1)), ("", 0))
        return name if count > ALARM_SHARE * ALARM_AMONG else ""

    def line(self, running: int, seconds: float) -> str:
        """One line for the terminal."""
        total = self.rollouts.total()
        parts = [
            f"{self.groups} groups",
            f"{total} rollouts ({total / max(seconds, 1e-9):.1f}/s)",
            f"{running} running",
        ]
        if self.rewards:
            parts.append(f"reward {sum(self.rewards) / len(self.rewards):.3f}")
        if self.given_up:
            parts.append(f"{self.given_up} groups given up")
        if self.failures:
            failures = ", ".join(f"{count} {failure}" for failure, count in sorted(self.failures.items()))
            parts.append(f"agents failed: {failures}")
        if self.alarm:
            parts.append(f"{self.last_exceptions.count(self.alarm)} of the last {ALARM_AMONG} ended by {self.alarm}")
        if failed := total - self.rollouts["completed"]:
            parts.append(f"{failed} not completed (last: {self.why[:100]})")
        return ", ".join(parts)
