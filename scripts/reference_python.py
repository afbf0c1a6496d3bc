"""docs/reference/python.md: the names that programs import, with their signatures and what their docstrings say."""

import ast
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from enum import Enum
from importlib import import_module
from textwrap import dedent
from typing import Any, cast

from pydantic import BaseModel

from stepwell import errors

HEAD = """# Python

Written by `scripts/reference.py` from the code. These are the public names;
all others may change without notice.
"""

PUBLIC: Mapping[str, Mapping[str, Sequence[str]]] = {
    "For agents": {
        "stepwell": ("connect", "Run", "TrajectoryContext"),
        "stepwell.agents.blackbox": ("BlackBoxAgentFlow",),
        "stepwell.agents.whitebox": ("AgentFlowBase", "Generation"),
        "stepwell.agents.claw_r1": ("AgentFlowBase", "ClawR1Flow", "Step", "register", "provide_modules"),
        "stepwell.agents.flows": ("SingleTurn", "ToolLoop", "SubprocessAgent", "last_number"),
        "stepwell.agents.cli_agents": ("ClaudeCode", "Codex", "OpenClaw", "Opencode", "QwenCode"),
        "stepwell.agents.rollout": ("Rollout", "RolloutResult", "RolloutStatus"),
        "stepwell.agents.outcome": ("AgentFailure", "AgentFailed"),
        "stepwell.agents.rollouter": ("AsyncRollouter",),
        "stepwell.agents.dataset": ("Dataset", "Position"),
        "stepwell.agents.validation": ("Validation", "ValidationReport"),
        "stepwell.agents.gateway_process": ("GatewayProcess",),
    },
    "For environments": {
        "stepwell.envs": (
            *("BaseEnv", "BaseEnvConfig", "APIServerConfig", "ServerBaseline", "EvalHandling", "ScoredDataGroup"),
            *("gather", "tokenize_for_trainer"),
        ),
        "stepwell.nemo_gym": ("PoolTokenSink", "PoolTokenSource", "PoolLineage"),
    },
    "For rewards": {
        "stepwell.rewards": ("Score", "Sample"),
    },
    "For trainers": {
        "stepwell.pool.client": ("connect", "DataPool"),
        "stepwell.pool.client.batch": ("Batch",),
        "stepwell.steps.step": ("Step",),
        "stepwell.trainers.trainer": ("AsyncTrainer",),
        "stepwell.trainers.settings": ("Settings", "FeedSettings", "RowSettings"),
        "stepwell.trainers.reporting": ("ToConsole", "ToJsonl", "ToWandb"),
        "stepwell.trainers.weight_sync": ("WeightSync", "SyncReport"),
        "stepwell.trainers.guard.guarded_sync": ("GuardedSync",),
        "stepwell.trainers.guard.guard_settings": ("GuardSettings",),
        "stepwell.trainers.transfers": ("CheckpointTransfer",),
        "stepwell.trainers.loader": ("pool_loader",),
        "stepwell.trainers.verl": ("to_data_proto",),
        "stepwell.trainers.trl": ("StepwellRolloutWorker", "StepwellWeightTransfer"),
        "stepwell.trainers.trl_callback": ("StepwellCallback", "last_checkpoint"),
        "stepwell.trainers.tinker.tinker_loop": ("TinkerTrainer", "TinkerUpdate", "run_side_by_side"),
        "stepwell.trainers.tinker.tinker_settings": ("TinkerSettings",),
        "stepwell.trainers.tinker.adapter_sync": ("AdapterSync",),
    },
    "For curation": {
        "stepwell.pool.client": ("CurationAction", "Curation"),
    },
    "For other languages' tables": {
        "stepwell.wire.scored_groups": ("group_from_json",),
        "stepwell.wire.scored_groups_arrow": ("groups_to_arrow", "groups_from_arrow"),
    },
}
"""Modules and their public names, by audience."""
EXTENDED = ("EnvTracking", "Environment", "PoolCapture", "SupervisedProcess")
"""Classes whose members are shown at the public class that extends them."""

WIDTH = 100


def page() -> str:
    parts = [HEAD]
    for title, modules in PUBLIC.items():
        parts.append(f"\n## {title}\n")
        for module, names in modules.items():
            parts += [_entry(module, name, getattr(import_module(module), name)) for name in names]
    return "".join(parts) + _failures()


def _entry(module: str, name: str, what: Any) -> str:
    parts = [f"\n### {module}.{name}", _code(_class(what) if inspect.isclass(what) else _function(name, what))]
    if docstring := _own_docstring(what):
        parts.append(docstring)
    if inspect.isclass(what):
        parts += [table for table in (_fields(what), _methods(what)) if table]
    return "\n\n".join(parts) + "\n"


def _code(text: str) -> str:
    return f"```text\n{text}\n```"


def _class(kind: type) -> str:
    """How it is made, where that is not just its fields."""
    if issubclass(kind, (Enum, BaseModel)) or is_dataclass(kind) or _is_typed_dict(kind):
        return f"class {kind.__name__}"
    return _function(kind.__name__, vars(kind).get("__init__") or kind.__init__, answers=False)


def _function(name: str, function: Any, *, answers: bool = True) -> str:
    """Its signature as it is written in the source, without self."""
    node = _source(function)
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    prefix = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    answer = f" -> {_unquoted(node.returns)}" if answers and node.returns else ""
    parameters = [text for text in _parameters(node.args) if text not in ("self", "cls")]
    line = f"{prefix}{name}({', '.join(parameters)}){answer}"
    if len(line) <= WIDTH:
        return line
    return f"{prefix}{name}(\n    " + ",\n    ".join(parameters) + f",\n){answer}"


def _parameters(given: ast.arguments) -> Iterator[str]:
    """One after the other, `*` included."""
    without = [None] * (len(given.args) - len(given.defaults))
    for argument, default in zip(given.args, [*without, *given.defaults], strict=True):
        yield _parameter(argument, default)
    if given.vararg or given.kwonlyargs:
        yield f"*{_parameter(given.vararg, None)}" if given.vararg else "*"
    for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        yield _parameter(argument, default)
    if given.kwarg:
        yield f"**{_parameter(given.kwarg, None)}"


def _parameter(argument: ast.arg, default: ast.expr | None) -> str:
    kind = f": {_unquoted(argument.annotation)}" if argument.annotation else ""
    return argument.arg + kind + (f" = {ast.unparse(default)}" if default else "")


def _unquoted(annotation: ast.expr) -> str:
    return ast.unparse(WithoutQuotes().visit(annotation))


class WithoutQuotes(ast.NodeTransformer):
    """Annotations in quotes become plain ones; the values of Literal keep theirs."""

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        return node if ast.unparse(node.value).endswith("Literal") else cast("ast.expr", self.generic_visit(node))

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        return ast.parse(node.value, mode="eval").body if isinstance(node.value, str) else node


def _source(what: Any) -> ast.stmt:
    (node,) = ast.parse(dedent(inspect.getsource(what))).body
    return node


def _is_typed_dict(kind: type) -> bool:
    return hasattr(kind, "__total__")


def _own_docstring(what: Any) -> str:
    generated = is_dataclass(what) and str(what.__doc__).startswith(f"{getattr(what, '__name__', '')}(")
    inherited = inspect.isclass(what) and "__doc__" not in vars(what)
    return "" if generated or inherited or not what.__doc__ else inspect.cleandoc(what.__doc__)


def _fields(kind: type) -> str:
    rows = [f"| `{name}` | `{annotation}` | {text} |" for name, annotation, text in _declared(kind)]
    return "\n".join(("| field | type | |", "|---|---|---|", *rows)) if rows else ""


def _declared(kind: type) -> Iterator[tuple[str, str, str]]:
    """A class's own public fields, with the docstrings that stand under them."""
    tree = _source(kind.__mro__[1] if kind.__mro__[1].__name__ in EXTENDED else kind)
    assert isinstance(tree, ast.ClassDef)
    for node, following in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name, annotation = node.target.id, _unquoted(node.annotation)
        elif isinstance(node, ast.Assign) and issubclass(kind, Enum) and isinstance(node.targets[0], ast.Name):
            name, annotation = node.targets[0].id, ast.unparse(node.value).strip("'\"")
        else:
            continue
        if not name.startswith("_") and not annotation.startswith("ClassVar"):
            yield name, annotation.replace("|", r"\|"), _docstring_of(following)


def _docstring_of(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(node.value.value.split()).replace("|", r"\|")
    return ""


def _methods(kind: type) -> str:
    entries = []
    for name, member in _members(kind).items():
        getter = member.fget if isinstance(member, property) else getattr(member, "func", None)
        function = getter or getattr(member, "__func__", member)
        if name.startswith("_") or not inspect.isfunction(function):
            continue
        shown = _function(f".{name}", function)
        text = inspect.cleandoc(function.__doc__) if function.__doc__ else ""
        entries.append("\n\n".join(filter(None, (_code(shown.replace("()", "", 1) if getter else shown), text))))
    return "\n\n".join(entries)


def _members(kind: type) -> Mapping[str, Any]:
    """Its own, and those of the classes that it extends, if they are not public by themselves."""
    bases = [base for base in reversed(kind.__mro__[1:]) if base.__name__ in EXTENDED]
    return {name: member for owner in (*bases, kind) for name, member in vars(owner).items()}


def _failures() -> str:
    kinds = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, errors.StepwellError)]
    rows = [f"| `{kind.__name__}` | {' '.join(str(kind.__doc__).split())} |" for kind in kinds]
    head = "\n## Failures\n\nAll are in `stepwell.errors`, and their texts are meant to be shown.\n\n"
    return head + "\n".join(("| | |", "|---|---|", *rows)) + "\n"
