"""What came of calling a reward function once, and the rule for what counts as a score.

What always holds: whatever a function gives or raises becomes an Attempt; only finite numbers become a score.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real

import numpy as np
import orjson

from stepwell.pool.api.scoring import JudgementOutcome, Score
from stepwell.rewards.blame import shortened

NOTES_KEPT = 10_000
"""Characters."""
WANTED = "a reward function gives a float or a Score"


@dataclass(frozen=True, slots=True)
class Attempt:
    outcome: JudgementOutcome
    score: Score | None = None
    """There if, and only if, the outcome is SCORE."""
    why: str = ""
    """What went wrong, in words."""
    seconds: float = 0.0


class NoScore(Exception):
    """What a function gave is none; the text says why."""


def attempt_of(result: object, steps: int, seconds: float) -> Attempt:
    """What a function gave for a sample of so many steps."""
    try:
        return Attempt(JudgementOutcome.SCORE, as_score(result, steps), seconds=seconds)
    except NoScore as why:
        return Attempt(JudgementOutcome.ERROR, why=str(why), seconds=seconds)


def as_score(result: object, steps: int) -> Score:
    if not isinstance(result, Score):
        return Score(_number(result, "it"))
    if not isinstance(result.parts, Mapping):
        raise NoScore(f"its Score's parts are a {type(result.parts).__name__}; they are numbers by name")
    rewards = tuple(
        None if reward is None else _number(reward, f"for step {place} it")
        for place, reward in enumerate(result.step_rewards)
    )
    if rewards and len(rewards) != steps:
        raise NoScore(f"it gave {len(rewards)} step rewards for a trajectory of {steps} steps")
    return Score(
        value=_number(result.value, "it"),
        parts={str(name): _number(part, f"as part {name!r} it") for name, part in result.parts.items()},
        step_rewards=rewards,
        notes=shortened(str(result.notes), NOTES_KEPT),
    )


def write_attempt(number: int, attempt: Attempt, *, leaving: bool) -> bytes:
    """As a child tells it; `number` is the sample's, and a child that is leaving takes no other one."""
    score = attempt.score
    return orjson.dumps(
        [
            number,
            leaving,
            attempt.outcome,
            attempt.why,
            attempt.seconds,
            None if score is None else [score.value, dict(score.parts), score.step_rewards, score.notes],
        ]
    )


def read_attempt(answer: bytes) -> tuple[int, Attempt, bool]:
    """The number, the attempt, and whether the child is leaving."""
    number, leaving, outcome, why, seconds, score = orjson.loads(answer)
    if score is not None:
        value, parts, step_rewards, notes = score
        score = Score(value, parts, tuple(step_rewards), notes)
    return number, Attempt(JudgementOutcome(outcome), score, why, seconds), leaving


def _number(given: object, who: str) -> float:
    if given is None:
        raise NoScore(f"{who} gave None; does it return what it computes? {WANTED}")
    if not isinstance(given, Real | np.bool_):
        raise NoScore(f"{who} gave a {type(given).__name__} ({shortened(repr(given), 80)}); {WANTED}")
    try:
        number = float(given)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise NoScore(f"{who} gave {number}, which is no reward")
    return number
