"""How the calls of a group were sampled, for groups that do not say it themselves.

- A call is noted in the group whose task makes it, or a task that this task has started. Calls of evaluations are not.
- A group gets the temperature if every call of it had the same. Otherwise (other players, judges, calls without a
  temperature) it is not known, and the group gets none.
- A call whose temperature does not describe its distribution (top_p, penalties) counts as one without. That of a greedy
  call does: nobody may take its group for sampled at another one.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeAlias

from stepwell.envs.scored_data import ScoredDataGroup
from stepwell.steps.trainable import SMALLEST_TEMPERATURE

AskedSampling: TypeAlias = tuple[float | None, str | None]
"""The temperature, and why the answer does not represent the policy."""
_noted: ContextVar[set[float | None] | None] = ContextVar("noted", default=None)


@contextmanager
def noting_sampling() -> Iterator[None]:
    token = _noted.set(set())
    try:
        yield
    finally:
        _noted.reset(token)


def note_sampling(answers: Iterable[AskedSampling]) -> None:
    noted = _noted.get()
    if noted is not None:
        noted.update(
            temperature if reason is None or is_greedy(temperature) else None for temperature, reason in answers
        )


def is_greedy(temperature: float | None) -> bool:
    return temperature is not None and temperature < SMALLEST_TEMPERATURE


def add_temperatures(group: ScoredDataGroup) -> None:
    """Adds the temperatures that are known, if the group has neither temperatures nor the parameters that it was
    sampled with."""
    noted = _noted.get() or set()
    if group.get("temperatures") or group.get("generation_params") or len(noted) != 1:
        return
    (temperature,) = noted
    if temperature is not None:
        group["temperatures"] = [temperature] * len(group["tokens"])
