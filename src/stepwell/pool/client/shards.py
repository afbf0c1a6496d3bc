"""The shards of one DataPool, as a client reaches them.

- The plan says which shards there are. It may change: a client looks now and then, and is told when it calls a shard
  that knows a newer one.
- Calls are typed: `shards.at(name)` is a ShardService. The only untyped call is the one inside a transport.
- A call to a shard that restarts is repeated until its timeout. PoolUnavailable says why it failed.
- One question waits at a shard for all news that is waited for here: in a process, and in the link of a machine.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast
from uuid import uuid4

from stepwell.errors import PoolUnavailable, StepwellError
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.transport import (
    PLAN,
    UNSEEN,
    ActorAway,
    ActorMissing,
    ActorTransport,
    News,
    Revision,
    Seen,
    WaitNews,
)
from stepwell.pool.shard.operation import Operation

if TYPE_CHECKING:
    from stepwell.pool.shard.service import ShardService

T = TypeVar("T")

CALL_TIMEOUT = 30.0
"""Seconds that a call waits for a shard. A killed shard is back after about three."""
PART_TIMEOUT = 1.5
"""Seconds that a question to all shards waits for each of them. A shard that does not answer is named as missing. As
long as the promise of an answer in two seconds allows, so that a shard that is only slow is counted."""
PLAN_TIMEOUT = 0.4
"""Seconds until a second shard is asked for the pool's plan."""
PLAN_AGE = 5.0
"""Seconds after which a client looks for a newer plan. A shard that is no longer needed runs for longer."""
RETRY_PAUSE = 0.2

NEWS_WAIT = 50.0
"""Seconds that a question waits for news, give or take a fifth, so that those of many processes do not come at once."""


class SharedQuestion:
    """The question at one shard. It is itself asked as a shard is."""

    def __init__(self, ask: WaitNews, *, wait: float = NEWS_WAIT) -> None:
        self._ask = ask
        self._wait = wait
        self._name = uuid4().hex
        self._waiting: dict[str, tuple[asyncio.Future[News], Seen]] = {}
        """By asker."""
        self._asked: dict[str, Revision] = {}
        """What the running question asks for."""
        self._asking: asyncio.Task[None] | None = None
        self._earlier: set[asyncio.Task[None]] = set()
        """Questions that were replaced, until the shard has ended them."""

    async def wait(self, asker: str, seen: Seen, timeout: float) -> News:
        """Raises what the question raises."""
        answer: asyncio.Future[News] = asyncio.get_running_loop().create_future()
        if (earlier := self._waiting.pop(asker, None)) is not None:
            _settle(earlier[0], {})
        self._waiting[asker] = (answer, seen)
        if not all(topic in self._asked and self._asked[topic].covers(seen[topic]) for topic in seen):
            self._ask_for({})
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    return await answer
            return {}
        finally:
            if asker in self._waiting and self._waiting[asker][0] is answer:
                del self._waiting[asker]

    def _ask_for(self, dealt: Seen) -> None:
        """What all wait for, and more of what was just dealt: who has got it is about to come back."""
        asked = dict(dealt)
        for _, seen in self._waiting.values():
            for topic, revision in seen.items():
                asked[topic] = _oldest(asked.get(topic, revision), revision)
        if self._asking is not None:
            self._earlier.add(self._asking)
            self._asking.add_done_callback(self._earlier.discard)
        self._asked = asked
        self._asking = asyncio.create_task(self._question(asked))

    async def _question(self, asked: Seen) -> None:
        try:
            news = await self._ask(self._name, asked, self._wait * random.uniform(0.8, 1.2))
        except Exception as failure:  # noqa: BLE001 - all who wait get it
            if self._asking is asyncio.current_task():
                self._asking, self._asked = None, {}
                for answer, _ in self._waiting.values():
                    _settle(answer, failure)
                self._waiting.clear()
            return
        dealt = self._deal(news)
        if self._asking is asyncio.current_task():
            self._asking, self._asked = None, {}
            if self._waiting:
                self._ask_for(dealt)

    def _deal(self, news: News) -> Seen:
        """Returns what somebody has got."""
        dealt: dict[str, Revision] = {}
        for asker, (answer, seen) in list(self._waiting.items()):
            own = {topic: item for topic, item in news.items() if seen.get(topic, item.revision) != item.revision}
            if own:
                _settle(answer, own)
                del self._waiting[asker]
                dealt |= {topic: item.revision for topic, item in own.items()}
        return dealt


def _oldest(one: Revision, other: Revision) -> Revision:
    if one.epoch != other.epoch:
        return UNSEEN
    return min(one, other)


def _settle(answer: "asyncio.Future[News]", outcome: News | Exception) -> None:
    if answer.done():
        return
    if isinstance(outcome, Exception):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)


@dataclass(frozen=True, slots=True)
class PartialAnswer(Generic[T]):
    """What all shards that answer in time said. At least one did."""

    by_shard: Mapping[str, T]
    missing: tuple[str, ...]
    """The names of the other shards."""

    @property
    def parts(self) -> list[T]:
        return list(self.by_shard.values())


class ShardSet:
    """All shards of one pool.

    It works with one pool only. Another pool of the same name, created without the journals of the first, would refuse
    the steps that a gateway holds as unknown.
    """

    def __init__(
        self,
        pool: str,
        transport: ActorTransport,
        *,
        namespace: str = "default",
        timeout: float = CALL_TIMEOUT,
        part_timeout: float = PART_TIMEOUT,
    ) -> None:
        self.pool = pool
        self.timeout = timeout
        """Seconds that a call takes at most, unless it has a timeout of its own."""
        self.part_timeout = part_timeout
        self._transport = transport
        self._namespace = namespace
        self.on_new_plan: list[Callable[[PoolPlan], None]] = []
        """Called with every plan that this client begins to follow."""
        self._plan: PoolPlan | None = None
        self._plan_changed = asyncio.Event()
        """Replaced with every plan."""
        self._looked_at = 0.0
        self._told_until = 0.0
        """Until then a question waits at the first shard that brings a newer plan."""
        self._plan_seen = UNSEEN
        self._questions: dict[str, SharedQuestion] = {}
        """By shard: what this process waits for."""
        self._looking: asyncio.Task[None] | None = None
        self._pool_uid = ""
        """The uid of the pool with which it has begun; empty also if that is of a release without uids."""
        self._checked: dict[str, int] = {}
        """Shards that belong to that pool, with the connection over which they were asked."""

    async def plan(self, *, timeout: float | None = None) -> PoolPlan:
        """The newest that is known. It may be looked for in the background, so a client that calls it follows."""
        if self._plan is None:
            self._follow(await self._ask_plan(timeout))
        elif self._is_old() and (self._looking is None or self._looking.done()):
            self._looking = asyncio.create_task(self._look())
        assert self._plan is not None
        return self._plan

    async def agree_with(self, shard: str, *, timeout: float | None = None) -> PoolPlan:
        """This client and the shard know different plans: both follow the newer one. Returns that of the shard."""
        plan, found = await self.plan(), await self.at(shard, timeout=timeout).plan()
        if found.revision < plan.revision:
            found = await self.at(shard, timeout=timeout).adopt_plan(plan)
        self._follow(found)
        return found

    async def wait_news(self, shard: str, seen: Seen, timeout: float = NEWS_WAIT) -> News:
        """Returns news as soon as one of the topics is not as it was seen; nothing after `timeout`. PoolUnavailable if
        the shard is away. While something waits at the first shard, the plan is followed too."""
        question = self._questions.get(shard)
        if question is None:
            question = self._questions[shard] = SharedQuestion(partial(self._ask_news, shard))
        return await question.wait(uuid4().hex, seen, timeout)

    async def next_plan(self, timeout: float | None) -> None:
        """Until the plan changes, or for so many seconds if they are given."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._plan_changed.wait()

    async def names(self) -> tuple[str, ...]:
        return (await self.plan()).shard_names()

    async def owner(self, prompt_uid: str) -> str:
        """The name of the shard that opens the groups of a prompt."""
        return (await self.plan()).owners(prompt_uid)[-1]

    def at(self, shard: str, *, timeout: float | None = None, await_restart: bool = True) -> "ShardService":
        """The calls of one shard. A shard that restarts is waited for, unless `await_restart` is False."""
        call = partial(self._call, shard, self.timeout if timeout is None else timeout, await_restart)
        return cast("ShardService", _BoundShard(call))

    async def run(
        self, shard: str, operation: Operation[T], *, timeout: float | None = None, await_restart: bool = True
    ) -> T:
        """The answer of one shard to an operation that the layout of the shards does not route."""
        (answer,) = await self.at(shard, timeout=timeout, await_restart=await_restart).run([operation])
        if isinstance(answer, Exception):
            raise answer
        return cast("T", answer)

    async def call_all(
        self, call: Callable[["ShardService"], Awaitable[T]], *, timeout: float | None = None
    ) -> list[T]:
        """The same call to every shard; answers in the order of `names`."""
        return await asyncio.gather(*(call(self.at(name, timeout=timeout)) for name in await self.names()))

    async def ask_all(self, call: Callable[["ShardService"], Awaitable[T]]) -> PartialAnswer[T]:
        """The answers of the shards that answer within `part_timeout`. If none does, the first answer is waited for, as
        in a call to one shard; PoolUnavailable if there is none."""
        return await self.ask_each(lambda _, shard: call(shard))

    async def ask_each(
        self, call: Callable[[str, "ShardService"], Awaitable[T]], *, timeout: float | None = None
    ) -> PartialAnswer[T]:
        """The same with a question of its own for each shard, by its name."""
        names = (await self.plan(timeout=timeout)).shard_names()
        calls: dict[asyncio.Future[T], str] = {
            asyncio.ensure_future(call(name, self.at(name, timeout=timeout))): name for name in names
        }
        done = await _first_answers(calls, self.part_timeout)
        failures = [failure for task in done if (failure := task.exception()) is not None]
        for failure in failures:
            if len(failures) == len(names) or not isinstance(failure, PoolUnavailable):
                raise failure
        answers = {calls[task]: task.result() for task in done if task.exception() is None}
        by_shard = {name: answers[name] for name in names if name in answers}
        return PartialAnswer(by_shard, tuple(name for name in names if name not in answers))

    async def while_it_answers(self, shard: str, call: Awaitable[T]) -> T:
        """The result of a call to the shard that may take long. PoolUnavailable if the shard does not even say its plan
        meanwhile: it is stopped, or cannot be reached."""
        calling = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait([calling], timeout=self.part_timeout))[0]:
                await self.at(shard, timeout=2 * self.part_timeout, await_restart=False).plan()
            return calling.result()
        finally:
            calling.cancel()

    async def _ask_news(self, shard: str, asker: str, seen: Seen, timeout: float) -> News:
        calls = self.at(shard, timeout=timeout + self.timeout, await_restart=False)
        if shard != self.pool:
            return await calls.wait_news(asker, seen, timeout)
        self._told_until = until = time.monotonic() + timeout
        try:
            news = dict(await calls.wait_news(asker, {**seen, PLAN: self._plan_seen}, timeout))
        finally:
            if self._told_until == until:
                self._told_until = 0.0
        if (item := news.pop(PLAN, None)) is not None:
            self._plan_seen = item.revision
            self._follow(item.value)
        return news

    def _is_old(self) -> bool:
        return time.monotonic() > max(self._looked_at + PLAN_AGE, self._told_until)

    async def _look(self) -> None:
        self._looked_at = time.monotonic()
        with suppress(StepwellError):
            self._follow(await self._ask_plan(None))

    def _follow(self, plan: PoolPlan) -> None:
        """A plan that is not newer changes nothing."""
        if self._plan is None or plan.revision > self._plan.revision:
            self._plan, self._looked_at = plan, time.monotonic()
            self._plan_changed.set()
            self._plan_changed = asyncio.Event()
            for follow in self.on_new_plan:
                follow(plan)

    async def _ask_plan(self, timeout: float | None) -> PoolPlan:
        """From the first shard. If it does not answer soon, the second one may: every shard knows the whole plan."""

        async def ask_second() -> PoolPlan:
            await asyncio.sleep(PLAN_TIMEOUT)
            return await self.at(PoolPlan(name=self.pool, shards=2).shard_names()[1], timeout=timeout).plan()

        first = asyncio.ensure_future(self.at(self.pool, timeout=timeout).plan())
        done = await _first_answers([first, asyncio.ensure_future(ask_second())], 0.0)
        answered = [task for task in done if task.exception() is None]
        return (answered or [first])[0].result()

    async def _check_pool(self, shard: str) -> None:
        """A shard that was found anew may be one of another pool."""
        connection = self._transport.connections
        plan: PoolPlan = await self._transport.call(shard, "plan", (), {})
        if not self._pool_uid:
            self._pool_uid = plan.uid
        elif plan.uid != self._pool_uid and plan.journal is not None:
            raise PoolUnavailable(
                f"DataPool {self.pool!r} was created again with other journals, and does not have what this process "
                "works on: end it and create it with the old ones, or restart this process to go on with the new pool"
            )
        self._checked[shard] = connection

    async def _call(
        self, shard: str, timeout: float, await_restart: bool, method: str, *args: Any, **kwargs: Any
    ) -> Any:
        what = type(args[0][0]).__name__ if method == "run" else method
        reason = "it did not answer"
        try:
            async with asyncio.timeout(timeout):
                while True:
                    try:
                        if self._checked.get(shard) != self._transport.connections:
                            await self._check_pool(shard)
                        return await self._transport.call(shard, method, args, kwargs)
                    except ActorMissing:
                        self._checked.pop(shard, None)
                        raise PoolUnavailable(
                            f"no DataPool named {shard!r} in Ray namespace {self._namespace!r}; create it with: "
                            f"stepwell pool --name {self.pool} --ray-namespace {self._namespace}"
                        ) from None
                    except ActorAway as away:
                        self._checked.pop(shard, None)
                        reason = f"it is away ({away})"
                        if not await_restart:
                            raise PoolUnavailable(f"DataPool {shard!r}: no {what}; {reason}") from None
                    await asyncio.sleep(RETRY_PAUSE)
        except TimeoutError:
            raise PoolUnavailable(f"DataPool {shard!r}: no {what} within {timeout:g} s; {reason}") from None


async def _first_answers(calls: Iterable["asyncio.Future[T]"], timeout: float | None) -> "set[asyncio.Future[T]]":
    """The calls that end within `timeout`; if all of them fail, also those that end later, up to the first success.

    The others are cancelled.
    """
    pending = set(calls)
    try:
        done, pending = await asyncio.wait(pending, timeout=timeout)
        while pending and all(call.exception() for call in done):
            more, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            done |= more
        return done
    finally:
        for call in pending:
            call.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


class _BoundShard:
    """Turns `.method(args)` into a call. `ShardSet.at` gives it the type ShardService."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Awaitable[Any]]) -> None:
        self._call = call

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        return partial(self._call, method)
