"""Reward functions, loaded by name: `module:function`, `path/to/file.py:function`, or the name of a built-in.

If a function cannot be loaded, BadRequest says why. Loading runs the code of the function's author.
"""

from functools import partial

from pydantic import ValidationError

from stepwell.common.async_calls import is_async
from stepwell.common.imports import HOW_TO_NAME, load_member
from stepwell.common.user_input import explain_all
from stepwell.errors import BadRequest, NotReady
from stepwell.rewards.confinement.sandbox import SandboxLevel
from stepwell.rewards.function import RewardFunction, failure_text
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
