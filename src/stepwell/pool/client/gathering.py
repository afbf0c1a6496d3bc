"""Operations of several processes share messages to a shard: a call to an actor costs about the same whatever it
carries.

- A message holds what came while the one before it was under way, but for large ones, and a shard gets one at a time.
- What a shard cannot read fails alone: the others of its message are sent again.
- All that wait for news of a shard share one question.
- An operation leaves at once if no message is under way. Under load the messages grow instead of their number.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from stepwell.common.async_calls import BatchSender
from stepwell.errors import BadRequest, PoolUnavailable
from stepwell.pool.api.transport import ActorAway, ActorMissing, ActorTransport, News, Seen
from stepwell.pool.client.shards import SharedQuestion
from stepwell.pool.shard.operation import Operation

LARGEST_MESSAGE = 4 * 2**20
"""Bytes, unless a single process sends more."""
MESSAGE_TIMEOUT = 30.0
"""Seconds that a message may take: as long as a client waits for it. The ones behind it do not wait for longer."""
MOST_TOPICS = 1_000
"""In a question of one process."""


class GatheringTransport:
    """Implements ActorTransport."""

    def __init__(self, transport: ActorTransport, *, timeout: float = MESSAGE_TIMEOUT) -> None:
        self._transport = transport
        self._timeout = timeout
        self._senders: dict[tuple[str, int | None], BatchSender[Sequence[Any], list[Any]]] = {}
        """By shard and revision of the plan."""
        self._questions: dict[str, SharedQuestion] = {}
        """By shard: what all processes wait for."""

    @property
    def connections(self) -> int:
        return self._transport.connections

    async def call(self, actor: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if method == "wait_news":
            return await self._question(actor).wait(*_checked(*args))
        if method != "run":
            return await self._transport.call(actor, method, args, kwargs)
        (operations,) = args
        if not all(isinstance(operation, Operation) for operation in operations):
            raise BadRequest("a message to a shard is a list of operations")
        sender = self._senders.get((actor, kwargs.get("revision")))
        if sender is None:
            sender = self._new_sender(actor, kwargs)
        return await sender.submit(operations)

    def _question(self, shard: str) -> SharedQuestion:
        async def ask(asker: str, seen: Seen, timeout: float) -> News:
            try:
                async with asyncio.timeout(timeout + self._timeout):
                    news: News = await self._transport.call(shard, "wait_news", (asker, seen, timeout), {})
            except TimeoutError:
                raise ActorAway(f"no answer within {timeout + self._timeout:.0f} s") from None
            return news

        if shard not in self._questions:
            self._questions[shard] = SharedQuestion(ask)
        return self._questions[shard]

    def _new_sender(self, shard: str, kwargs: Mapping[str, Any]) -> BatchSender[Sequence[Any], list[Any]]:
        async def send_one(message: Sequence[Any]) -> list[Any] | Exception:
            try:
                answers = await self._run(shard, message, kwargs)
            except Exception as failure:  # noqa: BLE001 - whoever sent it gets it
                return failure
            return answers

        async def send(messages: list[Sequence[Any]]) -> Sequence[list[Any] | Exception]:
            joined = [operation for message in messages for operation in message]
            try:
                answers = iter(await self._run(shard, joined, kwargs))
            except (ActorAway, ActorMissing, PoolUnavailable):
                raise
            except Exception:
                if len(messages) == 1:
                    raise
                return await asyncio.gather(*map(send_one, messages))
            return [[next(answers) for _ in message] for message in messages]

        sender = BatchSender[Sequence[Any], list[Any]](send, weigh=_weight, max_weight=LARGEST_MESSAGE)
        self._senders[shard, kwargs.get("revision")] = sender
        return sender

    async def _run(self, shard: str, operations: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        try:
            async with asyncio.timeout(self._timeout):
                answers: list[Any] = await self._transport.call(shard, "run", (operations,), kwargs)
        except TimeoutError:
            raise ActorAway(f"no answer within {self._timeout:g} s") from None
        return answers


def _checked(asker: str, seen: Seen, timeout: float) -> tuple[str, Seen, float]:
    """The questions of other processes are sent with this one."""
    texts = [asker, *seen, *(revision.epoch for revision in seen.values())]
    numbers = [timeout, *(revision.number for revision in seen.values())]
    if len(seen) > MOST_TOPICS or {*map(type, texts)} != {str} or not {int, float}.issuperset(map(type, numbers)):
        raise BadRequest("a question for news has topics with their revisions, and a time")
    return asker, seen, timeout


def _weight(operations: Sequence[Any]) -> int:
    return sum(operation.nbytes for operation in operations)
