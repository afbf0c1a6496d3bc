"""A group made of concurrent rollouts. Rollouts that are missing are tried once more; the others are kept."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from stepwell.envs.scored_data import Item, ScoredDataItem
from stepwell.errors import BadRequest

TRIES = 2

CollectOne = Callable[[Item], Awaitable[tuple[ScoredDataItem | None, list[Item]]]]


@dataclass(slots=True)
class Collected:
    rollouts: list[ScoredDataItem] = field(default_factory=list)
    backlog: list[Item] = field(default_factory=list)
    failure: BaseException | None = None
    """The last failure."""


async def collect(collect_one: CollectOne, item: Item, count: int) -> Collected:
    """Up to `count` rollouts of the item; fewer if some failed or were None in every try."""
    collected = Collected()
    for _ in range(TRIES):
        missing = count - len(collected.rollouts)
        results = await asyncio.gather(*(collect_one(item) for _ in range(missing)), return_exceptions=True)
        for result in results:
            _add(collected, result)
    return collected


def _add(collected: Collected, result: object) -> None:
    if isinstance(result, BaseException):
        collected.failure = result
        return
    rollout, backlog = _read(result)
    collected.backlog += backlog
    if rollout is not None:
        collected.rollouts.append(rollout)


def _read(result: object) -> tuple[ScoredDataItem | None, list[Item]]:
    match result:
        case (None | dict() as rollout, list() as backlog):
            return rollout, backlog  # type: ignore[return-value]
    raise BadRequest(
        "collect_trajectory returns a rollout (a dictionary with tokens, masks and scores, or None) and a list of items"
        f" for the backlog, not {str(result)[:200]}; to return anything else, write collect_trajectories instead"
    )
