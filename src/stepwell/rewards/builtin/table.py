"""The built-in reward functions: one table, name to factory.

A factory takes options as keywords and gives a function of a sample. What always holds: options that do not fit are
refused when the function is made, as a ValueError that says which.
"""

from collections.abc import Callable

from pydantic import validate_call

from stepwell.rewards.builtin.judge import judge
from stepwell.rewards.builtin.matching import exact_match, format_match, normalised_match, number_match, regex_match
from stepwell.rewards.builtin.mathematics import math_equal
from stepwell.rewards.builtin.process import per_step
from stepwell.rewards.builtin.python_tests import python_tests
from stepwell.rewards.builtin.reward_model import reward_model
from stepwell.rewards.builtin.schema import json_schema
from stepwell.rewards.builtin.shaping import length_shaping, weighted_sum
from stepwell.rewards.loading import Call

FACTORIES: tuple[Callable[..., Call], ...] = (
    exact_match,
    normalised_match,
    number_match,
    math_equal,
    regex_match,
    format_match,
    json_schema,
    python_tests,
    length_shaping,
    weighted_sum,
    per_step,
    judge,
    reward_model,
)

BUILT_IN: dict[str, Callable[..., Call]] = {factory.__name__: validate_call(factory) for factory in FACTORIES}
