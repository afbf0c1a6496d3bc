"""What every rollout asks the pool, gathered: a message costs a shard and a gateway more than what it asks for.

One message a shard is under way at a time, with all that was asked while the last one was: a lone question waits for
nothing, and under load the messages grow instead of their number. What always holds: each question is answered for
itself, whatever becomes of those beside it, and within the same patience as a message of its own.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from stepwell.errors import PoolUnavailable
from stepwell.pool.client.shards import PATIENCE, ShardSet


@dataclass(slots=True, eq=False)
class Question:
    """A method of the pool's intake, and what it is called with."""

    method: str
    args: tuple[Any, ...]
    answer: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class CallBatcher:
    def __init__(self, shards: ShardSet) -> None:
        self._shards = shards
        self._waiting: dict[str, list[Question]] = {}
        self._couriers: dict[str, asyncio.Task[None]] = {}
        """By shard, while there is something to deliver."""

    async def ask(self, shard: str, method: str, *args: Any) -> Any:
        question = Question(method, args)
        self._waiting.setdefault(shard, []).append(question)
        if shard not in self._couriers:
            self._couriers[shard] = asyncio.create_task(self._deliver(shard))
        try:
            async with asyncio.timeout(PATIENCE):
                return await question.answer
        except TimeoutError:
            raise PoolUnavailable(f"DataPool {shard!r}: no answer to {method} within {PATIENCE:g} s") from None

    async def _deliver(self, shard: str) -> None:
        try:
            while waiting := self._waiting.pop(shard, None):
                if message := [question for question in waiting if not question.answer.done()]:
                    await self._exchange(shard, message)
        finally:
            del self._couriers[shard]

    async def _exchange(self, shard: str, message: Sequence[Question]) -> None:
        try:
            asked = [(question.method, question.args) for question in message]
            answers = await self._shards.ask(shard, "answer", asked)
        except Exception as failure:  # noqa: BLE001 - it is raised again where each answer is awaited
            answers = [failure] * len(message)
        for question, answer in zip(message, answers, strict=True):
            if question.answer.done():
                continue
            if isinstance(answer, Exception):
                question.answer.set_exception(answer)
            else:
                question.answer.set_result(answer)
