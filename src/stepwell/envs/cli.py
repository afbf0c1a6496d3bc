"""The command line of an environment: `python my_env.py serve | process | evaluate`.

Whatever is wrong is said in one line; --help loads nothing that only work needs.
"""

# ruff: noqa: T201 - a command line prints

import asyncio
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from stepwell import logs
from stepwell.envs.flags import Defaults, Flags, Parser, ProcessFlags, Told, read_flags
from stepwell.errors import StepwellError

if TYPE_CHECKING:
    from stepwell.common.tokenizers import Decode
    from stepwell.envs.base import BaseEnv
    from stepwell.envs.loop.progress import Show


def main(kind: "type[BaseEnv]", argv: Sequence[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if argv is None else argv)
    program = Path(sys.argv[0]).name
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage(program, kind))
        return
    command, *rest = arguments
    if command not in COMMANDS:
        fail(program, f"unknown command {command!r}; there are: {', '.join(COMMANDS)}", status=2)
    try:
        told = read(kind, command, rest, f"{program} {command}")
    except StepwellError as failure:
        fail(f"{program} {command}", str(failure), status=2)
    try:
        run(kind, command, told)
    except StepwellError as failure:
        fail(f"{program} {command}", str(failure), status=1)


def usage(program: str, kind: "type[BaseEnv]") -> str:
    lines = [f"  {name:10} {about}" for name, (about, *_) in COMMANDS.items()]
    about = cleandoc(kind.__doc__ or kind.__name__).split("\n\n")[0]
    return "\n".join((f"usage: {program} COMMAND [FLAGS]\n", f"{about}\n", *lines, "\nCOMMAND --help lists its flags."))


def read(kind: "type[BaseEnv]", command: str, argv: Sequence[str], program: str) -> Told:
    env, servers = kind.config_init()
    defaults = Defaults(env, servers if isinstance(servers, Sequence) else [servers])
    about, flags, _ = COMMANDS[command]
    return read_flags(flags, defaults, argv, Parser(program, f"{about.capitalize()}."))


def run(kind: "type[BaseEnv]", command: str, told: Told) -> None:
    from stepwell.envs.loop.show import showing

    with showing() as show:
        logs.setup(json=os.environ.get("STEPWELL_LOG") == "json")  # within, so that lines do not break the bars
        COMMANDS[command][2](kind(told.env, told.servers), told, show)


def serve(env: "BaseEnv", told: Told, show: "Show") -> None:
    from stepwell.envs.loop import lifecycle as life

    asyncio.run(life.serve(env, show))


def process(env: "BaseEnv", told: Told, show: "Show") -> None:
    from stepwell.envs.loop import lifecycle as life
    from stepwell.envs.output.group_files import PAGE, GroupFolder

    assert isinstance(told.flags, ProcessFlags)
    folder = Path(told.flags.out)
    with closing(GroupFolder(folder, env.name, decoder(env, told))) as sink:
        written = asyncio.run(life.process(env, told.flags.groups, sink, show))
    if not written:
        raise StepwellError("no group was made; what is said above tells why")
    print(f"{written} groups in {folder}; to read: {folder / PAGE}")


def evaluate(env: "BaseEnv", told: Told, show: "Show") -> None:
    from stepwell.envs.loop import lifecycle as life

    metrics: Mapping[str, float] = asyncio.run(life.evaluate(env, show))
    for name, value in metrics.items():
        print(f"{name} {value:.6g}")


def decoder(env: "BaseEnv", told: Told) -> "Decode | None":
    """The tokenizer's, where one was named."""
    named = told.env.tokenizer_name or any(server.tokenizer_name for server in told.servers)
    return (lambda ids: str(env.tokenizer.decode(ids))) if named else None


def fail(program: str, text: str, *, status: int) -> NoReturn:
    for line in text.splitlines():
        print(f"{program}: {line}", file=sys.stderr)
    sys.exit(status)


COMMANDS: dict[str, tuple[str, type[Flags], Callable[["BaseEnv", Told, "Show"], None]]] = {
    "serve": ("make groups and send them to the rollout server, for as long as the training lasts", Flags, serve),
    "process": ("make some groups and write them to files, without a rollout server", ProcessFlags, process),
    "evaluate": ("evaluate once and print what came of it, without a rollout server", Flags, evaluate),
}
"""By name: what --help says, the flags, and what it does."""
