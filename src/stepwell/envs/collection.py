"""A group made of concurrent rollouts. Rollouts that are missing are tried once more; the others are kept."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from stepwell.envs.scored_data import Item, ScoredDataGroup, ScoredDataItem, gather
from stepwell.errors import BadRequest

TRIES = 2

CollectOne: TypeAlias = Callable[[Item], Awaitable[tuple[ScoredDataItem | None, list[Item]]]]


async def collect_group(collect_one: CollectOne, item: Item, size: int) -> tuple[ScoredDataGroup | None, list[Item]]:
    """The group of the item, and the items for the backlog. If rollouts are missing after every try, the last failure
    is raised; None without a failure."""
    rollouts: list[ScoredDataItem] = []
    backlog: list[Item] = []
    failure: BaseException | None = None
    for _ in range(TRIES):
        missing = size - len(rollouts)
        for result in await asyncio.gather(*(collect_one(item) for _ in range(missing)), return_exceptions=True):
            match result:
                case BaseException():
                    failure = result
                case (None | dict() as rollout, list() as more):
                    backlog += more
                    rollouts += [] if rollout is None else [rollout]  # type: ignore[list-item]
                case _:
                    raise BadRequest(
                        "collect_trajectory returns a rollout (a dictionary with tokens, masks and scores, or None) and"
                        f" a list of items for the backlog, not {str(result)[:200]}; to return anything else, write"
                        " collect_trajectories instead"
                    )
    if len(rollouts) == size:
        return gather(rollouts), backlog
    if failure is not None:
        raise failure
    return None, backlog
