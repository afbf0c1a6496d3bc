"""Reward functions with the signature of verl's and Claw-R1's custom reward functions:
`compute_score(data_source, solution_str, ground_truth, extra_info)`.

They are known by the names of their parameters. What a dataset's fields say is in the trajectory's metadata.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from functools import wraps
from numbers import Real
from typing import Any, TypeAlias

import numpy as np
import orjson

from stepwell.common.async_calls import is_async
from stepwell.pool.api.scoring import Score
from stepwell.rewards.function import Call
from stepwell.rewards.sample import Sample

ComputeScore: TypeAlias = Callable[..., Any]
MARKS = {"solution_str", "ground_truth"}
SCORE = "score"


def is_compute_score(call: Callable[..., Any]) -> bool:
    return _names(call) >= MARKS


def as_reward_function(compute_score: ComputeScore) -> Call:
    if is_async(compute_score):

        @wraps(compute_score)
        async def score_async(sample: Sample) -> float | Score:
            return _as_score(await compute_score(**_arguments(compute_score, sample)))

        return score_async

    @wraps(compute_score)
    def score(sample: Sample) -> float | Score:
        return _as_score(compute_score(**_arguments(compute_score, sample)))

    return score


def _names(call: Callable[..., Any]) -> set[str]:
    try:
        return set(inspect.signature(call).parameters)
    except (TypeError, ValueError):  # some callables have no signature
        return set()


def _arguments(compute_score: ComputeScore, sample: Sample) -> dict[str, Any]:
    fields = sample.metadata
    rule = fields.get("reward_model")
    if not isinstance(rule, Mapping) or "ground_truth" not in rule:
        raise ValueError("the metadata has no reward_model with a ground_truth, which compute_score needs")
    extra = fields.get("extra_info")
    arguments = {
        "data_source": fields.get("data_source", ""),
        "solution_str": sample.response_text,
        "ground_truth": rule["ground_truth"],
        "extra_info": {**(extra if isinstance(extra, Mapping) else {}), "num_turns": sample.num_turns},
    }
    takes = _names(compute_score)
    return {name: value for name, value in arguments.items() if name in takes}


def _as_score(told: Any) -> float | Score:
    """A number; or a dictionary with a `score`, whose other finite numbers become parts, and the rest a note."""
    if not isinstance(told, Mapping):
        return told  # type: ignore[no-any-return]  # the worker refuses what is no number
    if SCORE not in told:
        raise ValueError(f"compute_score returned a dictionary without {SCORE!r}: {', '.join(map(str, told))}")
    rest = {str(name): value for name, value in told.items() if name != SCORE}
    parts = {name: float(value) for name, value in rest.items() if _is_finite(value)}
    notes = {name: value for name, value in rest.items() if name not in parts}
    return Score(told[SCORE], parts, notes=orjson.dumps(notes, default=str).decode() if notes else "")


def _is_finite(value: object) -> bool:
    """A part that is no finite number would make the whole score an error."""
    return isinstance(value, Real | np.bool_) and math.isfinite(value)
