"""The command line. `stepwell --help` imports no room; a command imports only what it needs."""

import os
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import version

from stepwell import logs
from stepwell.commands import COMMANDS, function_of, settings_of
from stepwell.common.command_line import fail, failing, tell
from stepwell.common.files import keep_files_private
from stepwell.errors import RayUnreachable

EXAMPLES = (
    "examples:",
    "  stepwell doctor --engine http://127.0.0.1:8001   before a run: is this engine token-exact?",
    "  stepwell up --engine http://127.0.0.1:8001       everything on this machine",
    "  stepwell status                                  what it does",
    "  stepwell down                                    stop it; the data stays",
)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
    elif arguments[0] == "--version":
        print(f"stepwell {version('stepwell')}")
    elif (command := command_of(arguments)) is not None:
        run(command, arguments[len(command.split()) :], f"stepwell {command}")
    elif (family := commands_under(arguments[0])) and (len(arguments) == 1 or arguments[1] in ("-h", "--help")):
        print(family_usage(family))
    else:
        words = " ".join(arguments[: 2 if family else 1])
        fail("stepwell", f"unknown command {words!r}; there are: {', '.join(family or COMMANDS)}", status=2)


def command_of(arguments: Sequence[str]) -> str | None:
    """The command that the first two words or the first word name."""
    candidates = (" ".join(arguments[:words]) for words in (2, 1))
    return next((command for command in candidates if command in COMMANDS), None)


def commands_under(word: str) -> list[str]:
    """The commands of two words that begin with this one."""
    return [command for command in COMMANDS if command.startswith(f"{word} ")]


def family_usage(commands: Sequence[str]) -> str:
    return "\n".join(
        ("usage: stepwell COMMAND [FLAGS]\n", *_lines(commands), "\nstepwell COMMAND --help lists its flags.")
    )


def usage() -> str:
    return "\n".join(
        (
            "usage: stepwell COMMAND [FLAGS]\n",
            "Middleware for reinforcement learning of LLM agents.\n",
            *_lines(COMMANDS),
            "\nstepwell COMMAND --help lists its flags, with examples. stepwell --version prints the version.\n",
            *EXAMPLES,
        )
    )


def _lines(commands: Iterable[str]) -> list[str]:
    return [f"  {name:15} {COMMANDS[name][0]}" for name in commands]


def run(command: str, arguments: Sequence[str], program: str) -> None:
    """Run one command. A failure is reported in one line."""
    from stepwell.commands.sections import read_settings  # not before: --help needs none

    logs.setup(json=os.environ.get("STEPWELL_LOG") == "json")
    keep_files_private()
    with failing(program, status=2):
        settings = read_settings(settings_of(command), arguments, program)
    with failing(program, status=1):
        try:
            function_of(command)(settings)
        except RayUnreachable as failure:
            sys.stdout.flush()
            tell(program, str(failure))
            os._exit(1)  # Ray may still try to connect, and would print until this process has ended
