"""One trajectory of a real agent's, from its first call to its steps in the pool.

Each has a channel of its own in the pool that all tests share.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat.chat_completion_chunk import ChoiceDeltaToolCall

import stepwell
from stepwell.client import TrajectoryContext
from stepwell.pool.client import DataPool
from stepwell.steps.step import Step

FETCH_TIMEOUT = 20.0


@dataclass(slots=True)
class Episode:
    agent: AsyncOpenAI
    """Knows the trajectory's base_url and key; retries nothing, so that every failure shows."""
    http: httpx.AsyncClient
    """The same without the openai package."""
    trajectory: TrajectoryContext
    channel: str
    pool: DataPool

    async def ask(self, *, stream: bool, **asked: Any) -> tuple["Heard", int]:
        """A chat answer of one choice, and the engine's own count of its tokens."""
        if not stream:
            reply: ChatCompletion = await self.agent.chat.completions.create(**asked)
            assert reply.usage is not None
            return heard_whole(reply)[0], reply.usage.completion_tokens
        asked["stream_options"] = {"include_usage": True}
        chunks = [chunk async for chunk in await self.agent.chat.completions.create(stream=True, **asked)]
        assert chunks[-1].usage is not None
        return heard_streamed(chunks)[0], chunks[-1].usage.completion_tokens

    async def steps(self) -> list[Step]:
        """End the trajectory; gives what the pool has of it, untrainable steps included."""
        await asyncio.to_thread(self.trajectory.__exit__, None, None, None)
        batch = await asyncio.to_thread(
            self.pool.fetch_batch, 1, channel=self.channel, untrainable=True, timeout=FETCH_TIMEOUT
        )
        return batch.steps()


@asynccontextmanager
async def open_episode(gateway_url: str, pool: DataPool) -> AsyncIterator[Episode]:
    channel = uuid.uuid4().hex
    run = await asyncio.to_thread(stepwell.connect, gateway_url)
    trajectory = run.trajectory(channel=channel)
    await asyncio.to_thread(trajectory.__enter__)
    async with (
        AsyncOpenAI(base_url=trajectory.base_url, api_key=trajectory.api_key, max_retries=0) as agent,
        httpx.AsyncClient(base_url=trajectory.base_url, timeout=120) as http,
    ):
        yield Episode(agent, http, trajectory, channel, pool)


@dataclass(slots=True)
class Heard:
    """A choice of a chat answer, as the agent got it."""

    text: str = ""
    finish_reason: str | None = None
    logprobs: list[float] = field(default_factory=list)
    tools: list[tuple[str, str]] = field(default_factory=list)
    """Names and arguments of the tool calls."""


def heard_whole(reply: ChatCompletion) -> list[Heard]:
    """Each choice of an unstreamed answer."""
    return [
        Heard(
            text=choice.message.content or "",
            finish_reason=choice.finish_reason,
            logprobs=[entry.logprob for entry in choice.logprobs.content or []] if choice.logprobs else [],
            tools=[
                (call.function.name, call.function.arguments)
                for call in choice.message.tool_calls or []
                if call.type == "function"
            ],
        )
        for choice in reply.choices
    ]


def heard_streamed(chunks: Iterable[ChatCompletionChunk]) -> list[Heard]:
    """Each choice of a streamed answer, put together as an agent does it."""
    heard: dict[int, Heard] = {}
    for piece in (piece for chunk in chunks for piece in chunk.choices):
        so_far = heard.setdefault(piece.index, Heard())
        so_far.finish_reason = piece.finish_reason or so_far.finish_reason
        so_far.text += piece.delta.content or ""
        so_far.logprobs += [entry.logprob for entry in piece.logprobs.content or []] if piece.logprobs else []
        for call in piece.delta.tool_calls or []:
            _hear_call(so_far.tools, call)
    return [heard[index] for index in sorted(heard)]


def _hear_call(tools: list[tuple[str, str]], call: ChoiceDeltaToolCall) -> None:
    assert call.function is not None
    if call.index == len(tools):
        tools.append(("", ""))
    name, arguments = tools[call.index]
    tools[call.index] = (name + (call.function.name or ""), arguments + (call.function.arguments or ""))
