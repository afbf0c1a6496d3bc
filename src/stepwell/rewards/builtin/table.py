"""The built-in reward functions: one table, name to factory.

A factory takes its options as keywords and returns a function of a sample. Invalid options are refused when the
function is made, with a ValueError that names them.
"""

from collections.abc import Callable

from pydantic import ConfigDict, validate_call

from stepwell.rewards.builtin.composition import length_shaping, per_step, weighted_sum
from stepwell.rewards.builtin.judge import judge, reward_model
from stepwell.rewards.builtin.matching import (
    exact_match,
    format_match,
    json_schema,
    normalised_match,
    number_match,
    regex_match,
)
from stepwell.rewards.builtin.mathematics import math_equal
from stepwell.rewards.builtin.next_state import next_state
from stepwell.rewards.builtin.python_tests import python_tests
from stepwell.rewards.confinement.sandbox import SandboxLevel
from stepwell.rewards.function import Call, Loader
from stepwell.steps.step import JsonObject

FACTORIES: tuple[Callable[..., Call], ...] = (
    exact_match,
    normalised_match,
    number_match,
    math_equal,
    regex_match,
    format_match,
    json_schema,
    judge,
    reward_model,
    next_state,
)
COMPOSING_FACTORIES: tuple[Callable[..., Call], ...] = (length_shaping, weighted_sum, per_step)
"""The factories that take a Loader too, as the first argument."""
CODE_FACTORIES: tuple[Callable[..., Call], ...] = (python_tests,)
"""The factories that run generated code, and take the level of their sandbox as the first argument."""

BUILT_IN: dict[str, Callable[..., Call]] = {
    factory.__name__: validate_call(config=ConfigDict(arbitrary_types_allowed=True))(factory)
    for factory in (*FACTORIES, *COMPOSING_FACTORIES, *CODE_FACTORIES)
}


def make_built_in(name: str, options: JsonObject, load: Loader, level: SandboxLevel) -> Call:
    if _is_among(COMPOSING_FACTORIES, name):
        return BUILT_IN[name](load, **options)
    return BUILT_IN[name](level, **options) if _is_among(CODE_FACTORIES, name) else BUILT_IN[name](**options)


def _is_among(factories: tuple[Callable[..., Call], ...], name: str) -> bool:
    return any(factory.__name__ == name for factory in factories)
