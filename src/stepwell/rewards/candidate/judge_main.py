"""The program that runs one test of a candidate's code: the job as JSON on stdin, the verdict as JSON on stdout.

- The code runs in another process. The names that the test uses and the code defines are functions here, which ask that
  process and give what it answers as values (values.py). So every operator of the test works on Python's own types.
- What the code sends makes values, raises an exception of Python's, or ends the test, which has then failed: no test
  can catch that.
- A test that wants more than values is refused before the code runs, whatever the code is (source.py).
"""

import builtins
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from stepwell.rewards.candidate.source import EVALUATE, HOW, NAMES, TEST, ParsedTest, RefusedTest, read_source
from stepwell.rewards.candidate.start import LONGEST_TEXT, failure_text, prepare, read_job
from stepwell.rewards.candidate.values import Ended, LineChannel, TooLargeValue, Unsayable, from_json, to_json

NOT_PASSED_ON = (StopIteration, StopAsyncIteration)
"""Exceptions that would end a loop of the test."""


class Judge:
    """The test's end of the channel."""

    def __init__(self, channel: LineChannel, answers: int) -> None:
        self._channel = channel
        self._answers = answers
        self.is_influenced = False
        """The code has given the test a value, so it can be the reason for whatever the test does next."""

    def end(self, **verdict: object) -> NoReturn:
        os.write(self._answers, json.dumps(verdict).encode())
        os._exit(0)

    def run(self, source: ParsedTest, code: str) -> None:
        """Raises what the test raises."""
        self._ask("the code", "start", code)
        namespace: dict[str, Any] = {"__name__": TEST, "__builtins__": builtins, NAMES: CodeNames(self)}
        for name, value in self.names(*source.names).items():
            if name in vars(builtins):
                raise AssertionError(
                    f"the code redefines {name}, which the test uses; a test calls it candidate.{name}"
                )
            self.is_influenced |= not callable(value)
            namespace[name] = value
        exec(source.program, namespace | {EVALUATE: self.evaluate})

    def names(self, *names: str) -> dict[str, Any]:
        """The functions and values among these names that the code defines."""
        found = self._ask("the code", "names", *names)
        try:
            return {
                name: CodeFunction(self, name) if found[name][0] else found[name][1] for name in names if name in found
            }
        except Exception:  # noqa: BLE001 - the code sent it
            self.end(failed="the code's process sent names that cannot be read")

    def evaluate(self, source: str) -> Any:
        """Python that runs beside the code, and gives the value of its last line."""
        self.is_influenced = True
        return self._ask(f"{EVALUATE}(…)", "run", str(source))

    def call(self, name: str, args: list[Any], keywords: dict[str, Any]) -> Any:
        changing = [*args, *keywords.values()]
        try:
            return self._ask(f"{name}(…)", "call", name, args, keywords, changing=changing)
        finally:
            self.is_influenced = True

    def _ask(self, what: str, operation: str, *arguments: Any, changing: Sequence[Any] = ()) -> Any:
        """`changing` are the parts of the arguments that become what the code has made of them."""
        question = [operation, self._written(what, arguments)]
        try:
            self._channel.send(question)
            outcome, content, changed, printed = self._channel.receive()
            answer = ANSWERS[outcome](content)
            if changing and changed is not None:
                _, args, keywords = from_json(changed)
                for mine, now in zip(changing, [*args, *keywords.values()], strict=True):
                    replace_contents(mine, now)
            sys.stdout.write(str.__str__(printed))
        except Ended:
            self.end(failed="ended before the test did")
        except Exception as wrong:  # noqa: BLE001 - the code sent it
            self.end(failed=f"{what} and the test could not exchange values: {failure_text(wrong)}")
        if outcome == "raise":
            raise answer
        if outcome == "object":
            self.end(failed=f"{what} gives {answer}, which is no value. A test of it can {HOW}")
        return answer

    def _written(self, what: str, arguments: tuple[Any, ...]) -> Any:
        try:
            return to_json([*arguments])
        except TooLargeValue as why:
            self.end(failed=f"{what} is given {why}")
        except Unsayable as why:
            sentence = f"{what} is given {why}, and only values can be given to the code; {HOW}"
            is_test_at_fault = not self.is_influenced and not isinstance(why.value, CodeFunction)
            self.end(**{"broken" if is_test_at_fault else "failed": sentence})


class CodeFunction:
    """A name of the code in the test: a call of it is a call in the code's process."""

    def __init__(self, judge: Judge, name: str) -> None:
        self.__name__ = self.__qualname__ = name
        self.__judge = judge

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self.__judge.call(self.__name__, [*args], keywords)


class CodeNames:
    """`candidate.pow` is the code's own function, also if Python has one of that name; `candidate.n` a value, now."""

    def __init__(self, judge: Judge) -> None:
        self.__judge = judge

    def __getattr__(self, name: str) -> Any:
        for value in self.__judge.names(name).values():
            self.__judge.is_influenced = True
            return value
        raise AttributeError(f"the code does not define {name!r}, or it is no function and no value")


def exception_of(content: Any) -> Exception:
    """One of Python's. What would end a loop or the process of the test is a RuntimeError."""
    name, arguments = content
    kind = vars(builtins).get(name)
    if not isinstance(kind, type) or not issubclass(kind, BaseException):
        raise ValueError("no exception")
    if not issubclass(kind, Exception) or issubclass(kind, NOT_PASSED_ON):
        return RuntimeError(f"the code raised {name}"[:LONGEST_TEXT])
    given = from_json(arguments)
    for base in kind.__mro__:
        if issubclass(base, Exception):
            with suppress(TypeError, ValueError):  # UnicodeDecodeError and its like want other arguments
                return base(*given)
    return RuntimeError(f"the code raised {name}")


ANSWERS: dict[str, Callable[[Any], Any]] = {
    "value": from_json,
    "raise": exception_of,
    "object": lambda content: str.__str__(content)[:LONGEST_TEXT],
}


def replace_contents(mine: Any, now: Any) -> None:
    """The test's own list, set, dict, … gets what the code has made of its copy."""
    if isinstance(mine, tuple):
        for part, part_now in zip(mine, now, strict=True):
            replace_contents(part, part_now)
    elif isinstance(mine, list | deque):
        mine.clear()
        mine.extend(now)
    elif isinstance(mine, set | dict):
        mine.clear()
        mine.update(now)
    elif isinstance(mine, bytearray):
        mine[:] = now
    elif type(mine).__module__ == "numpy" and hasattr(mine, "__setitem__"):
        mine[...] = now


def main() -> None:
    descriptor, answers = prepare()
    job = read_job()
    judge = Judge(LineChannel(descriptor), answers)
    try:
        judge.run(read_source(job["test"]), job["code"])
    except RefusedTest as why:
        judge.end(broken=str(why))
    except BaseException as failure:  # noqa: BLE001 - any exception is a failure
        judge.end(failed=failure_text(failure))
    judge.end(passed=True)
