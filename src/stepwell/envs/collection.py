"""A group made of rollouts at the same time. What is missing is tried again once; the others are kept for it."""

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
    """The last thing that went wrong."""


async def collect(collect_one: CollectOne, item: Item, count: int) -> Collected:
    """As many rollouts of the item as were wanted, or fewer, where some failed or gave None in every try."""
    collected = Collected()
    for _ in range(TRIES):
        missing = count - len(collected.rollouts)
        answers = await asyncio.gather(*(collect_one(item) for _ in range(missing)), return_exceptions=True)
        for answer in answers:
            _add(collected, answer)
    return collected


def _add(collected: Collected, answer: object) -> None:
    if isinstance(answer, BaseException):
        collected.failure = answer
        return
    rollout, backlog = _read(answer)
    collected.backlog += backlog
    if rollout is not None:
        collected.rollouts.append(rollout)


def _read(answer: object) -> tuple[ScoredDataItem | None, list[Item]]:
    match answer:
        case (None | dict() as rollout, list() as backlog):
            return rollout, backlog  # type: ignore[return-value]
    raise BadRequest(
        "collect_trajectory returns a rollout (a dictionary with tokens, masks and scores, or None) and a list of items"
        f" for the backlog, not {str(answer)[:200]}; to return anything else, write collect_trajectories instead"
    )
