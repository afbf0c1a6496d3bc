"""Operations travel to the shards that they are about, small ones in messages that they share.

- While a pool changes its shards, a group may be with a shard of a former layout. Those are asked first, and the one
  that may open a group is asked last.
- A call for a group carries the revision of the plan by which it was routed. A client and a shard that differ tell each
  other the newer plan, and the call is routed again. A call that a shard refuses for that has changed nothing.
- A call is routed again at once by a plan that is new to the client, otherwise after a pause, and until its timeout.
  Then the failure says which plans both sides follow.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, TypeVar, cast

from stepwell.common.async_calls import BatchSender
from stepwell.errors import PoolUnavailable, UnknownTrajectory
from stepwell.pool.api.plan import FIRST_REVISION, GroupElsewhere, LayoutDiffers, PoolPlan
from stepwell.pool.api.producing import FlushNeeded, SubmitVerdict
from stepwell.pool.client.shards import RETRY_PAUSE, ShardSet
from stepwell.pool.shard.operation import LongOperation, MergedOperation, Operation, ShardRoute
from stepwell.pool.slices.forgetting import Forget, ForgetOverdue, merge_receipts
from stepwell.steps.columns import Columns, cut, stack

P = TypeVar("P")
T = TypeVar("T")
R = TypeVar("R")

Submit = Callable[[str, list[int], PoolPlan], Awaitable[Sequence[SubmitVerdict]]]
"""Sends the steps with these indexes to a shard."""

LONG_TIMEOUT = 3600.0
"""Seconds that a long operation may take at a shard, such as reading a large archive as a whole."""
FIRST_PAUSE = 0.01
"""Seconds. Each further pause is twice as long, up to RETRY_PAUSE."""
MIN_TIMEOUT = 1.0
"""Seconds in which a shard says which plan it follows, also if the call has no time left."""


class Rerouting:
    """The further tries of one call, as long as this client and the shards do not follow the same plan."""

    def __init__(self, shards: ShardSet, timeout: float | None = None) -> None:
        self._shards = shards
        self._timeout = shards.timeout if timeout is None else timeout
        self._deadline = time.monotonic() + self._timeout
        self._pause = FIRST_PAUSE
        self.refused_by: set[str] = set()
        """The shards that follow another plan, by their answers to the last try."""
        self._routed_by = 0
        """The client's revision after the last refusal."""
        self._differing = ""
        """The plans that were followed at the last refusal."""

    async def agree(self) -> None:
        """With the shards that refused the last try. PoolUnavailable if there is no time for another one."""
        if not self.refused_by:
            return
        refusing, self.refused_by = sorted(self.refused_by), set()
        timeout = max(self._deadline - time.monotonic(), MIN_TIMEOUT)
        plans = await asyncio.gather(*(self._shards.agree_with(shard, timeout=timeout) for shard in refusing))
        followed = ", ".join(f"{shard} follows {plan.routing}" for shard, plan in zip(refusing, plans, strict=True))
        own = await self._shards.plan()
        self._differing = (
            f": no shard takes the call. Of the plan, {followed}, and this process {own.routing}. If that stays so, "
            "change the number of shards again: stepwell pool --shards"
        )
        if time.monotonic() + self._pause >= self._deadline:
            raise self.failure()
        if own.revision == self._routed_by:
            await asyncio.sleep(self._pause)
            self._pause = min(2 * self._pause, RETRY_PAUSE)
        self._routed_by = own.revision

    def failure(self) -> PoolUnavailable:
        pool, timeout = self._shards.pool, self._timeout
        return PoolUnavailable(f"DataPool {pool!r}: no answer within {timeout:g} s{self._differing}")


async def ask_owner(
    shards: ShardSet,
    prompt_uid: str,
    call: Callable[[str, PoolPlan], Awaitable[T]],
    rerouting: Rerouting | None = None,
) -> T:
    """The answer of the shard that has a group, or may open it. `call` gets the shard and the plan that names it."""
    rerouting = rerouting or Rerouting(shards)
    while True:
        plan = await shards.plan()
        for shard in plan.owners(prompt_uid):
            try:
                return await call(shard, plan)
            except GroupElsewhere:
                continue
            except LayoutDiffers:
                break
        rerouting.refused_by.add(shard)
        await rerouting.agree()


async def ask_owners(
    shards: ShardSet,
    prompt_uid: str,
    call: Callable[[str, PoolPlan], Awaitable[T]],
    rerouting: Rerouting | None = None,
) -> T:
    """Does the same as `ask_owner` for a call that opens no group: all shards that may have it are asked at once."""
    plan = await shards.plan()
    owners = plan.owners(prompt_uid)
    if len(owners) == 1:
        return await ask_owner(shards, prompt_uid, call, rerouting)
    asked = {shard: asyncio.ensure_future(call(shard, plan)) for shard in owners}
    try:
        return await ask_owner(
            shards, prompt_uid, lambda shard, plan: asked.pop(shard, None) or call(shard, plan), rerouting
        )
    finally:
        for asking in asked.values():
            asking.cancel()
        await asyncio.gather(*asked.values(), return_exceptions=True)


async def ask_any(shards: ShardSet, call: Callable[[str, PoolPlan], Awaitable[T]], unknown: UnknownTrajectory) -> T:
    """Asks the shards in turn for a trajectory that its own shard does not know: it may have been closed before the
    shards changed, and another shard remembers it. Raises `unknown` if none does."""
    plan = await shards.plan()
    for shard in plan.shard_names() if plan.revision > FIRST_REVISION else ():
        with suppress(UnknownTrajectory, GroupElsewhere):
            return await call(shard, plan)
    raise unknown


async def submit_to_owners(shards: ShardSet, prompt_uids: Sequence[str], submit: Submit) -> list[SubmitVerdict]:
    """One verdict for each step, in the order of their prompt_uids."""
    verdicts: dict[int, SubmitVerdict] = {}
    asked: Counter[int] = Counter()
    """How many shards do not have the group of each step, by the same plan."""
    rerouting = Rerouting(shards)
    plan = await shards.plan()

    async def submit_part(shard: str, indexes: list[int]) -> None:
        try:
            answers = await submit(shard, indexes, plan)
        except LayoutDiffers:
            rerouting.refused_by.add(shard)
            return
        for index, verdict in zip(indexes, answers, strict=True):
            if verdict is SubmitVerdict.ELSEWHERE:
                asked[index] += 1
                if shard == owners_of[prompt_uids[index]][-1]:
                    rerouting.refused_by.add(shard)
            else:
                verdicts[index] = verdict

    while len(verdicts) < len(prompt_uids):
        parts: dict[str, list[int]] = {}
        owners_of = {prompt_uid: plan.owners(prompt_uid) for prompt_uid in set(prompt_uids)}
        for index, prompt_uid in enumerate(prompt_uids):
            if index not in verdicts:
                owners = owners_of[prompt_uid]
                parts.setdefault(owners[asked[index] % len(owners)], []).append(index)
        await asyncio.gather(*(submit_part(shard, indexes) for shard, indexes in parts.items()))
        await rerouting.agree()
        if (newest := await shards.plan()).revision != plan.revision:
            plan = newest
            asked.clear()
    return [verdicts[index] for index in range(len(prompt_uids))]


def rows_of(columns: Columns, indexes: Sequence[int]) -> Columns:
    """The steps with these indexes, which ascend. If that is all of them, nothing is copied."""
    if len(indexes) == len(columns.prompt_uids):
        return columns
    wanted = set(indexes)
    runs = [(kept, len(list(run))) for kept, run in groupby(range(len(columns.prompt_uids)), key=wanted.__contains__)]
    pieces = cut(columns, [size for _, size in runs])
    return stack([piece for piece, (kept, _) in zip(pieces, runs, strict=True) if kept])


class AskingClient:
    """Asks the shards of one pool."""

    def __init__(self, shards: ShardSet) -> None:
        self.shards = shards
        self._senders: dict[tuple[str, int], BatchSender[Operation[Any], Any]] = {}
        """By shard and revision of the plan."""
        shards.on_new_plan.append(lambda _: self._senders.clear())

    async def ask(self, operation: Operation[R], *, timeout: float | None = None) -> R:
        """The answer of the shards that the operation is for. PoolUnavailable if there is none within `timeout`
        seconds, by default those of this client."""
        seconds = self.shards.timeout if timeout is None else timeout
        if isinstance(operation, MergedOperation):
            answer = await self.shards.ask_each(
                lambda name, _: self.shards.run(name, operation, timeout=seconds), timeout=seconds
            )
            return cast("R", operation.merge(answer.by_shard, answer.missing))
        if operation.route is ShardRoute.FIRST:
            return await self.shards.run(self.shards.pool, operation, timeout=seconds)
        ask, rerouting = ask_owners if operation.may_ask_all else ask_owner, Rerouting(self.shards, seconds)
        try:
            async with _limited(rerouting, seconds):
                return await ask(self.shards, operation.routed_by, partial(self.ask_at, operation), rerouting)
        except FlushNeeded:
            rerouting = Rerouting(self.shards, operation.flush_wait + self.shards.timeout)
            return await ask_owner(self.shards, operation.routed_by, partial(self._ask_flushed, operation), rerouting)

    async def ask_shard(self, operation: Operation[R], shard: str) -> R:
        """The answer of the shard that is named, in a message that it may share."""
        return await self.ask_at(operation, shard, await self.shards.plan())

    async def ask_at(self, operation: Operation[R], shard: str, plan: PoolPlan) -> R:
        """The answer of one shard, which `plan` names."""

        async def send(operations: list[Operation[Any]]) -> Sequence[Any]:
            return await self.shards.at(shard).run(operations, **plan.stamp)

        if operation.is_large:
            (answer,) = await send([operation])
            if isinstance(answer, Exception):
                raise answer
            return cast("R", answer)
        sender = self._senders.get((shard, plan.revision))
        if sender is None:
            sender = BatchSender(send, patience=attrgetter("patience"))
            self._senders[shard, plan.revision] = sender
        return cast("R", await sender.submit(operation))

    async def ask_long(self, operation: LongOperation[P], *, timeout: float = LONG_TIMEOUT) -> list[P]:
        """The answers of all shards. PoolUnavailable if one does not answer; it goes on all the same."""
        names, parts = await self.shards.names(), list[P]()
        again: LongOperation[P] | None = operation
        while again is not None:
            asked = again
            parts = await asyncio.gather(*(self.shards.at(name, timeout=timeout).run_long(asked) for name in names))
            again = asked.again(parts)
        return parts

    async def forget(self, subject: str | None, older_than: float = 0.0) -> dict[str, Any]:
        """Remove everything of a subject, or everything that is older than so many seconds, for good. The receipt.
        PoolUnavailable if a shard does not answer, or is not done: it goes on by itself."""
        operation = ForgetOverdue(older_than) if subject is None else Forget(subject)
        return merge_receipts(await self.ask_long(operation), time.time())

    def hurry(self) -> None:
        """Operations that wait for others leave now."""
        for sender in self._senders.values():
            sender.hurry()

    async def _ask_flushed(self, operation: Operation[R], shard: str, plan: PoolPlan) -> R:
        """After other gateways have sent what they hold."""
        calls = self.shards.at(shard, timeout=operation.flush_wait + self.shards.timeout)
        return cast("R", await calls.run_flushed(operation, operation.flush_wait, **plan.stamp))


@asynccontextmanager
async def _limited(rerouting: Rerouting, seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise rerouting.failure() from None
