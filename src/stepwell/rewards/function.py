"""The contract of a reward function: how it is called, what counts as a score, and the Attempt that every call becomes.

- Whatever a function returns or raises becomes an Attempt.
- Only finite numbers become a score.
"""

import math
import sysconfig
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import TypeAlias

import numpy as np
import orjson
from pydantic import TypeAdapter

import stepwell
from stepwell.pool.api.scoring import Attempt, JudgementOutcome, Score
from stepwell.rewards.sample import Sample

Call: TypeAlias = Callable[[Sample], float | Score | Awaitable[float | Score]]


@dataclass(frozen=True, slots=True)
class RewardFunction:
    name: str
    """The source of the rewards that it returns."""
    call: Call
    is_async: bool
    by_step: bool = False
    """Whether the function rewards single steps, of open trajectories too, as soon as a later step shows what came
    next. A function says so by an attribute `by_step = True`."""


Loader: TypeAlias = Callable[..., RewardFunction]
"""Takes a name and options; BadRequest if there is no such function."""


LONGEST_NOTES = 10_000
"""Characters."""
LONGEST_TEXT = 2_000
"""Characters; a longer text is cut in the middle, because both ends are informative."""
EXPECTED = "a reward function returns a float or a Score"
NOT_THE_AUTHORS = (str(Path(stepwell.__file__).parent), *sysconfig.get_paths().values(), "<frozen")
"""Folders that do not hold the code of the function's author."""
MESSAGE = TypeAdapter(tuple[int, Attempt, bool])


class NoScore(Exception):
    """A function's result is no score; the text says why."""


def attempt_of(result: object, steps: int, seconds: float) -> Attempt:
    """The attempt of a function that returned `result` for a sample of so many steps."""
    try:
        return Attempt(JudgementOutcome.SCORE, as_score(result, steps), seconds=seconds)
    except NoScore as why:
        return Attempt(JudgementOutcome.ERROR, why=str(why), seconds=seconds)


def as_score(result: object, steps: int) -> Score:
    if not isinstance(result, Score):
        return Score(_number(result, "it"))
    if not isinstance(result.parts, Mapping):
        raise NoScore(f"the parts of its Score are a {type(result.parts).__name__}; they must be numbers by name")
    rewards = tuple(
        None if reward is None else _number(reward, f"for step {place} it")
        for place, reward in enumerate(result.step_rewards)
    )
    if rewards and len(rewards) != steps:
        raise NoScore(f"it returned {len(rewards)} step rewards for a trajectory of {steps} steps")
    return Score(
        value=_number(result.value, "it"),
        parts={str(name): _number(part, f"as part {name!r} it") for name, part in result.parts.items()},
        step_rewards=rewards,
        notes=shortened(str(result.notes), LONGEST_NOTES),
        step_details=_details(result.step_details, steps),
        steps_only=bool(result.steps_only),
    )


def write_attempt(number: int, attempt: Attempt, *, is_leaving: bool) -> bytes:
    """The message of a child. `number` is the sample's; a child that is leaving accepts no other sample."""
    return orjson.dumps([number, attempt, is_leaving])


def read_attempt(message: bytes) -> tuple[int, Attempt, bool]:
    """The number, the attempt, and whether the child is leaving; ValueError if a child wrote something else."""
    return MESSAGE.validate_python(orjson.loads(message))


def failure_text(failure: BaseException) -> str:
    """The exception's type and text, and the innermost place that is not in Stepwell, Python or a package."""
    text = f"{type(failure).__name__}: {_text_of(failure)}".removesuffix(": ")
    frames = [f for f in traceback.extract_tb(failure.__traceback__) if not f.filename.startswith(NOT_THE_AUTHORS)]
    if isinstance(failure, SyntaxError) or not frames:
        return shortened(text)
    return shortened(f"{text} ({Path(frames[-1].filename).name}, line {frames[-1].lineno}, in {frames[-1].name})")


def shortened(text: str, limit: int = LONGEST_TEXT) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} […] {text[-half:]}"


def _details(details: Sequence[object], steps: int) -> tuple[dict[str, str] | None, ...]:
    if details and len(details) != steps:
        raise NoScore(f"it returned details of {len(details)} steps for a trajectory of {steps} steps")
    texts: list[dict[str, str] | None] = []
    for detail in details:
        if detail is not None and not isinstance(detail, Mapping):
            raise NoScore(f"the details of a step are a {type(detail).__name__}; they must be texts by name")
        items = None if detail is None else detail.items()
        texts.append(None if items is None else {str(name): shortened(str(text)) for name, text in items})
    return tuple(texts)


def _number(value: object, subject: str) -> float:
    if value is None:
        raise NoScore(f"{subject} returned None; is a return statement missing? {EXPECTED}")
    if not isinstance(value, Real | np.bool_):
        raise NoScore(f"{subject} returned a {type(value).__name__} ({shortened(repr(value), 80)}); {EXPECTED}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise NoScore(f"{subject} returned {number}, which is no reward")
    return number


def _text_of(failure: BaseException) -> str:
    """The class of an exception is the author's: even its `__str__` may fail."""
    try:
        return str(failure)
    except BaseException:  # noqa: BLE001 - see above
        return "(its text cannot be shown)"
