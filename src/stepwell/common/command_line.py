"""The common part of all command lines, those of `stepwell` and of environments: their flags and their failures.

- A failure is one line for each mistake, after the name of the program.
- A flag is written out in full. `--group_size` and `--group-size` are the same flag.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import NoReturn

from stepwell.errors import BadRequest, StepwellError

ONLY_FLAGS = "%(prog)s [FLAGS]"
"""A usage that lists no flags."""


class FlagParser(argparse.ArgumentParser):
    """A parser whose errors are BadRequest, with a suggestion for an unknown flag."""

    def __init__(
        self, program: str, about: str | None = None, *, usage: str | None = ONLY_FLAGS, epilog: str = ""
    ) -> None:
        super().__init__(
            prog=program,
            usage=usage,
            description=about,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        flag = next((word for word in message.split() if word.startswith("--")), "")
        near = get_close_matches(flag, self._option_string_actions, n=1)
        raise BadRequest(message + (f"; did you mean {near[0]}?" if "unrecognized" in message and near else ""))


def with_dashes(words: Sequence[str]) -> list[str]:
    """The words of a command line, with the names of flags as they are registered."""
    return [_with_dashes(word) if word.startswith("--") else word for word in words]


def _with_dashes(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def say(line: str) -> None:
    """A line of a command's result."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@contextmanager
def failing(program: str, *, status: int) -> Iterator[None]:
    """Ends the process with this status after a failure of the block, which is told."""
    try:
        yield
    except StepwellError as failure:
        fail(program, str(failure), status=status)


def tell(program: str, text: str) -> None:
    """Lines of a failure."""
    for line in text.splitlines():
        print(f"{program}: {line}", file=sys.stderr, flush=True)  # noqa: T201 - a command line prints


def fail(program: str, text: str, *, status: int) -> NoReturn:
    tell(program, text)
    sys.exit(status)
