"""Calls for groups, to the shards that have them.

- While a pool changes its shards, a group may be with a shard of a former layout. Those are asked first, and the one
  that may open a group is asked last.
- A call carries the revision of the plan by which it was routed. A client and a shard that differ tell each other the
  newer plan, and the call is routed again. A call that a shard refuses for that has changed nothing.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import groupby
from typing import TypeVar

from stepwell.errors import UnknownTrajectory
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.producing import SubmitVerdict
from stepwell.pool.api.shard_layout import FIRST_REVISION, GroupElsewhere, LayoutDiffers
from stepwell.pool.client.shards import ShardSet
from stepwell.steps.columns import Columns, cut, stack

T = TypeVar("T")

Submit = Callable[[str, list[int], PoolPlan], Awaitable[Sequence[SubmitVerdict]]]
"""Sends the steps with these indexes to a shard."""


async def ask_owner(shards: ShardSet, prompt_uid: str, call: Callable[[str, PoolPlan], Awaitable[T]]) -> T:
    """The answer of the shard that has a group, or may open it. `call` gets the shard and the plan that names it."""
    while True:
        plan = await shards.plan()
        for shard in plan.owners(prompt_uid):
            try:
                return await call(shard, plan)
            except GroupElsewhere:
                continue
            except LayoutDiffers:
                await shards.agree_with(shard)
                break


async def ask_owners(shards: ShardSet, prompt_uid: str, call: Callable[[str, PoolPlan], Awaitable[T]]) -> T:
    """As `ask_owner`, for a call that opens no group: all shards that may have it are asked at once."""
    plan = await shards.plan()
    owners = plan.owners(prompt_uid)
    if len(owners) == 1:
        return await ask_owner(shards, prompt_uid, call)
    asked = {shard: asyncio.ensure_future(call(shard, plan)) for shard in owners}
    try:
        return await ask_owner(shards, prompt_uid, lambda shard, plan: asked.pop(shard, None) or call(shard, plan))
    finally:
        for asking in asked.values():
            asking.cancel()
        await asyncio.gather(*asked.values(), return_exceptions=True)


async def ask_any(shards: ShardSet, call: Callable[[str, PoolPlan], Awaitable[T]], unknown: UnknownTrajectory) -> T:
    """As `ask_owner`, for a trajectory that its shard does not know: it may have been closed before the shards changed,
    and another one remembers it."""
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
    plan = await shards.plan()

    async def submit_part(shard: str, indexes: list[int]) -> None:
        try:
            answers = await submit(shard, indexes, plan)
        except LayoutDiffers:
            await shards.agree_with(shard)
            return
        for index, verdict in zip(indexes, answers, strict=True):
            if verdict is SubmitVerdict.ELSEWHERE:
                asked[index] += 1
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
