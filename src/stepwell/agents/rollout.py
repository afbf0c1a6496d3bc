"""A rollout, as an agent gets it, and what came of it."""

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
    """The agent failed; the pool dropped what it had."""
    EMPTY = "empty"
    """The agent made no call that could be kept; the pool let it go."""
    LATE = "late"
    """The pool had shipped or dropped it before it was over."""
    FAILED = "failed"
    """The gateway could not be told of its beginning or its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutResult:
    status: RolloutStatus
    prompt_uid: str
    trajectory_uid: str
    attempt: int
    channel: str
    reward: float | None = None
    """What the agent gave; None leaves it to others."""
    why: str = ""
    """What went wrong, in words."""
    seconds: float = 0.0

    @property
    def is_completed(self) -> bool:
        return self.status is RolloutStatus.COMPLETED


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One trajectory to be made: an agent takes it and gives its reward, or None."""

    base_url: str
    """For any OpenAI client."""
    api_key: str
    sample: Sample
    prompt_uid: str
    trajectory_uid: str
    attempt: int
    """0 the first time; a rollout that failed is tried again under the next number."""
    link: GatewayClient = field(repr=False)

    async def model(self) -> str:
        return await self.link.model()

    async def chat(self, messages: Sequence[Mapping[str, Any]], **wanted: Any) -> dict[str, Any]:
        """The model's next message, for agents that need no SDK; `wanted` is what else the chat API takes."""
        body = {"messages": messages, **wanted}
        if "model" not in body:
            body["model"] = await self.model()
        reply = await self.link.chat(self.base_url, self.api_key, body)
        return dict(reply["choices"][0]["message"])
