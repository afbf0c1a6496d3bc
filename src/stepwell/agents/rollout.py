"""A rollout as an agent gets it, and its result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

from stepwell.agents.gateway_client import GatewayClient

Sample: TypeAlias = Mapping[str, Any]
"""One entry of a dataset."""


class RolloutStatus(StrEnum):
    COMPLETED = "completed"
    ABORTED = "aborted"
    """The agent failed; the pool dropped its steps."""
    EMPTY = "empty"
    """The agent made no call that could be recorded; the pool removed it."""
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
    """What the agent returned; None if another part scores it."""
    why: str = ""
    """What went wrong; empty if nothing."""
    seconds: float = 0.0

    @property
    def is_completed(self) -> bool:
        return self.status is RolloutStatus.COMPLETED


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One trajectory to be made: the agent's argument."""

    base_url: str
    """For any OpenAI client."""
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
