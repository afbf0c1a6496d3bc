"""The command line of an environment: `python my_env.py serve | process | evaluate`.

Every error is one line. --help does not import what only a run needs.
"""

# ruff: noqa: T201 - a command line prints

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from stepwell import logs
from stepwell.common.command_line import FlagParser, fail, failing
from stepwell.envs.config import EnvFlags, EnvSettings, ProcessFlags, as_server_configs, read_flags
from stepwell.errors import StepwellError

log = logging.getLogger("stepwell.envs")

if TYPE_CHECKING:
    from stepwell.common.tokenizers import Decode
    from stepwell.envs.environment import Environment
    from stepwell.envs.loop.progress import ProgressView

FlagsOf: TypeAlias = Callable[["type[Environment]"], type[EnvFlags]]


def main(env_class: "type[Environment]", argv: Sequence[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if argv is None else argv)
    program = Path(sys.argv[0]).name
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage(program, env_class))
        return
    command, *rest = arguments
    if command not in COMMANDS:
        fail(program, f"unknown command {command!r}; there are: {', '.join(COMMANDS)}", status=2)
    with failing(f"{program} {command}", status=2):
        settings = read(env_class, command, rest, f"{program} {command}")
    with failing(f"{program} {command}", status=1):
        run(env_class, command, settings)


def usage(program: str, env_class: "type[Environment]") -> str:
    lines = [f"  {name:10} {about}" for name, (about, *_) in COMMANDS.items()]
    about = cleandoc(env_class.__doc__ or env_class.__name__).split("\n\n")[0]
    return "\n".join((f"usage: {program} COMMAND [FLAGS]\n", f"{about}\n", *lines, "\nCOMMAND --help lists its flags."))


def read(env_class: "type[Environment]", command: str, argv: Sequence[str], program: str) -> EnvSettings:
    about, flags_of, _ = COMMANDS[command]
    flags = flags_of(env_class)
    env, servers = flags.defaults or env_class.config_init()
    defaults = EnvSettings(env, as_server_configs(servers), flags.model_construct())
    return read_flags(defaults, argv, FlagParser(program, f"{about.capitalize()}."))


def run(env_class: "type[Environment]", command: str, settings: EnvSettings) -> None:
    from stepwell.envs.loop.progress import showing

    with showing() as view:
        logs.setup(json=os.environ.get("STEPWELL_LOG") == "json")  # here, so that log lines do not break the bars
        for note in settings.notes:
            log.warning(note)
        env = env_class.from_settings(settings)
        settings.flags.run_command(partial(COMMANDS[command][2], env, settings, view))


def serve(env: "Environment", settings: EnvSettings, view: "ProgressView") -> None:
    from stepwell.envs.loop import lifecycle

    asyncio.run(lifecycle.serve(env, view))


def process(env: "Environment", settings: EnvSettings, view: "ProgressView") -> None:
    from stepwell.envs.group_files import PAGE, GroupFolder
    from stepwell.envs.loop import lifecycle

    assert isinstance(settings.flags, ProcessFlags)
    folder = Path(settings.flags.out)
    with closing(GroupFolder(folder, env.name, decode_of(env, settings))) as sink:
        written = asyncio.run(lifecycle.process(env, settings.flags.groups, sink, view))
    if not written:
        raise StepwellError("no group was made; the messages above say why")
    print(f"{written} groups in {folder}; to read: {folder / PAGE}")


def evaluate(env: "Environment", settings: EnvSettings, view: "ProgressView") -> None:
    from stepwell.envs.loop import lifecycle

    metrics: Mapping[str, object] = asyncio.run(lifecycle.evaluate(env))
    for name, value in metrics.items():
        print(f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}")


def decode_of(env: "Environment", settings: EnvSettings) -> "Decode | None":
    """The tokenizer's, if the settings name one."""
    has_name = settings.env.tokenizer_name or any(server.tokenizer_name for server in settings.servers)
    return (lambda ids: str(env.tokenizer.decode(ids))) if has_name else None


COMMANDS: dict[str, tuple[str, FlagsOf, Callable[["Environment", EnvSettings, "ProgressView"], None]]] = {
    "serve": (
        "make groups and send them to the rollout server until the training ends",
        lambda env_class: env_class.get_cli_serve_config_cls(),
        serve,
    ),
    "process": (
        "make some groups and write them to files, without a rollout server",
        lambda env_class: env_class.get_cli_process_config_cls(),
        process,
    ),
    "evaluate": (
        "evaluate once and print the result, without a rollout server",
        lambda env_class: env_class.get_cli_evaluate_config_cls(),
        evaluate,
    ),
}
"""The commands by name: the help, the class of the flags, and the function."""
