"""Reward functions, loaded by name: `module:function`, `path/to/file.py:function`, or the name of a built-in.

- If a function cannot be loaded, BadRequest says why. Loading runs the code of the function's author.
- A function with the signature of verl's and Claw-R1's custom reward functions,
  `compute_score(data_source, solution_str, ground_truth, extra_info)`, is known by the names of its parameters. What a
  dataset's fields say is in the trajectory's metadata.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial, wraps
from numbers import Real
from typing import Any, TypeAlias

import numpy as np
import orjson
from pydantic import ValidationError

from stepwell.common.async_calls import is_async
from stepwell.common.imports import HOW_TO_NAME, load_member
from stepwell.common.user_input import explain_all
from stepwell.errors import BadRequest, NotReady
from stepwell.pool.api.scoring import Score
from stepwell.rewards.confinement.sandbox import SandboxLevel
from stepwell.rewards.function import Call, RewardFunction, failure_text
from stepwell.rewards.sample import Sample
from stepwell.steps.step import JsonObject


def load(
    name: str, options: JsonObject | None = None, *, sandbox: SandboxLevel = SandboxLevel.STRICT
) -> RewardFunction:
    """The function of that name. Files and modules are searched in the current folder first; only built-ins have
    options. `sandbox` is where a built-in function runs generated code."""
    if ":" not in name:
        return _as_function(name, _built_in(name, options or {}, sandbox))
    if options:
        raise BadRequest(f"options are for built-in functions; {name} takes none")
    return _as_function(*load_member(name, failure_text))


def _as_function(name: str, call: object) -> RewardFunction:
    if not callable(call):
        raise BadRequest(f"{name} is no function but a {type(call).__name__}")
    if is_compute_score(call):
        call = as_reward_function(call)
    return RewardFunction(name, call, is_async(call), bool(getattr(call, "by_step", False)))


def _built_in(name: str, options: JsonObject, sandbox: SandboxLevel) -> object:
    from stepwell.rewards.builtin.table import BUILT_IN, make_built_in  # slow; a child needs it only for a built-in

    if name not in BUILT_IN:
        there = ", ".join(sorted(BUILT_IN))
        raise BadRequest(f"no built-in reward function is called {name!r}; {HOW_TO_NAME}; there are {there}")
    try:
        return make_built_in(name, options, partial(load, sandbox=sandbox), sandbox)
    except ValidationError as invalid:
        raise BadRequest(f"{name} cannot be made with these options: {explain_all(invalid.errors())}") from invalid
    except NotReady as why:
        raise BadRequest(f"{name} cannot run here: {why}") from why
    except (TypeError, ValueError, ImportError) as failure:
        raise BadRequest(f"{name} cannot be made with these options: {failure}") from failure


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
