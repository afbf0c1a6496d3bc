"""docs/reference/commands.md: every command with its flags, from the settings in commands/."""

import argparse
import inspect
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from pydantic_settings.sources.types import _CliPositionalArg

from stepwell.commands import COMMANDS, settings_of
from stepwell.commands.sections import Section, flags_of

HEAD = """# Commands and settings

Written by `scripts/reference.py` from the code; `stepwell COMMAND --help` says the same.

Every setting is a flag, and can come from the environment: `stepwell pool --max-staleness 4` is also
`STEPWELL_POOL_MAX_STALENESS=4`. Flags take precedence over the environment, and that over defaults. `stepwell up` reads
`./stepwell.toml` too, between defaults and environment. An unknown flag or key is an error. Logs are JSON with
`STEPWELL_LOG=json`.

| command | |
|---|---|
"""


def page() -> str:
    listed = "".join(f"| [`stepwell {name}`](#{_anchor(name)}) | {text} |\n" for name, (text, *_) in COMMANDS.items())
    return HEAD + listed + "".join(_section(name) for name in COMMANDS)


def _anchor(command: str) -> str:
    return f"stepwell {command}".replace(" ", "-")


def _section(command: str) -> str:
    settings = settings_of(command)
    parts = [f"\n## stepwell {command}", inspect.cleandoc(settings.__doc__ or "")]
    values = _values(settings, command)
    if rows := [_row(name, field, values) for name, field in settings.model_fields.items() if _is_shown(field)]:
        parts += [
            f"Environment: `{settings.model_config['env_prefix']}` and the flag's name.",
            "\n".join(("| flag | default | |", "|---|---|---|", *rows)),
        ]
    parts.append("\n".join(("```bash", *settings.examples, "```")))
    return "\n\n".join(parts) + "\n"


def _is_shown(field: FieldInfo) -> bool:
    return argparse.SUPPRESS not in field.metadata


def _values(settings: type[Section], command: str) -> dict[str, str]:
    """By flag, what --help shows for its value, if it takes any but a choice."""
    actions = flags_of(settings, command).root_parser._actions
    named = {flag: action.metavar for action in actions for flag in action.option_strings}
    return {flag: value for flag, value in named.items() if isinstance(value, str) and not value.startswith("{")}


def _row(name: str, field: FieldInfo, values: Mapping[str, str]) -> str:
    words = " ".join((field.description or "").split())
    return f"| {_flag(field.alias or name, field, values)} | {_default(field)} | {words}{_choices(field)} |"


def _flag(name: str, field: FieldInfo, values: Mapping[str, str]) -> str:
    if _CliPositionalArg in field.metadata:
        return f"`{name.upper()}`"
    flag = f"--{name.replace('_', '-')}"
    return f"`{flag} {values[flag]}`" if flag in values else f"`{flag}`"


def _default(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True, validated_data={})
    if default is PydanticUndefined:
        return "**needed**"
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, tuple):
        default = ",".join(default)
    return f"`{default}`" if default not in (None, "", {}) else "–"


def _choices(field: FieldInfo) -> str:
    literals = [value for kind in _kinds(field.annotation) if get_origin(kind) is Literal for value in get_args(kind)]
    return f" ({', '.join(f'`{value}`' for value in literals)})" if literals else ""


def _kinds(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
