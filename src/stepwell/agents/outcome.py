"""Why a rollout failed: through the policy, or through the machines and the network around it. Pure.

- A failure of the policy completes the rollout with a reward, and it is trained. If it were aborted and sampled again,
  the model would never learn that it was wrong.
- A failure of the infrastructure says nothing about the policy: the rollout is aborted and tried again. The tables
  below say what counts as one.
- An exception that is not known counts as the policy's: most exceptions of an agent's code come from what the model
  wrote. `retry_on` names those that do not.
"""

import errno
import os
import re
import socket
import subprocess
import traceback
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from urllib.error import URLError

import aiohttp

from stepwell.common.processes import CommandFailed
from stepwell.errors import BadRequest, ContextLengthExceeded, StepwellError, TooLarge


class AgentFailure(StrEnum):
    TOO_LONG = "too_long"
    """The agent took longer than the flow's timeout, or an operation of its own timed out."""
    CONTEXT_OVERFLOW = "context_overflow"
    """The conversation became longer than the model's context."""
    GAVE_UP = "gave_up"
    """The agent said so, with AgentFailed."""
    BROKE_FORMAT = "broke_format"
    """The agent said so, with AgentFailed: it cannot use what the model wrote."""
    ERROR = "error"
    """Any other exception of the agent's code, or a reward that is not a number."""


class AgentFailed(Exception):
    """Raised by an agent to end its rollout with a failure of the policy."""

    def __init__(self, failure: AgentFailure | str, why: str = "", *, reward: float | None = None) -> None:
        """`reward` is used instead of the flow's reward for such failures."""
        super().__init__(why or str(failure))
        self.failure = AgentFailure(failure)
        self.reward = reward


MACHINE_EXCEPTIONS = (MemoryError, ImportError)
"""No memory, and a package that is not installed or cannot be loaded."""
MACHINE_ERRNOS: Mapping[int, str] = MappingProxyType(
    {
        errno.ENOSPC: "the disk is full",
        errno.EDQUOT: "the disk quota is used up",
        errno.EIO: "the disk cannot be read or written",
        errno.ESTALE: "a network file system is gone",
        errno.EMFILE: "the process has too many open files",
        errno.ENFILE: "the machine has too many open files",
        errno.ENOMEM: "there is no memory",
        errno.EAGAIN: "no more processes or threads can be started",
    }
)
NETWORK_ERRNOS: Mapping[int, str] = MappingProxyType(
    {
        errno.EHOSTUNREACH: "there is no route to the host",
        errno.EHOSTDOWN: "the host is down",
        errno.ENETUNREACH: "the network cannot be reached",
        errno.ENETDOWN: "the network is down",
        errno.ETIMEDOUT: "the connection timed out",
        errno.ENOBUFS: "the network has no buffers",
        errno.EADDRNOTAVAIL: "no local port is free",
    }
)
"""Refused, reset and broken connections are ConnectionErrors."""
MACHINE_TEXTS = ("can't start new thread",)
"""The texts of RuntimeErrors."""
MACHINE_EXIT_CODES: Mapping[int, str] = MappingProxyType(
    {
        125: "the program that starts the command failed: docker, podman, timeout",
        126: "the command cannot be executed",
        127: "the command is not there",
    }
)
"""Exit codes of an agent's command, and of `docker run`. A shell that runs what the model wrote has them too: such a
CalledProcessError is the policy's."""
CONTAINER_PROGRAMS = ("docker", "nerdctl", "podman")
GENERATED_CODE = "<string>"
"""The file name of code that is run with `exec`."""

OF_THE_POLICY = (BadRequest, TooLarge)
"""Refusals of a gateway that the content of a call causes; all other ones are the infrastructure's."""
CONTENT_STATUSES = (400, 413, 422)
"""The same, as HTTP statuses."""
OVERFLOW_TEXTS = (ContextLengthExceeded.code(), "maximum context length", "prompt is too long")
TIMEOUTS = ("APITimeoutError", "ReadTimeout", "ReadTimeoutError", "TimeoutExpired")
"""Exceptions of clients and of subprocess for an answer that does not come; no base class is common to them."""
HTTP_PACKAGES = ("aiohttp", "anthropic", "httpcore", "httpx", "httpx2", "openai", "requests", "urllib3")
"""Packages whose exceptions are about connections, if they have no HTTP status."""

_NUMBERS = {**MACHINE_ERRNOS, **NETWORK_ERRNOS}
_TOLD = re.compile(
    r"(?:^|: )(?:MemoryError|ImportError|ModuleNotFoundError)\b"
    rf"|\[Errno (?:{'|'.join(map(str, _NUMBERS))})\]"
    rf"|\b(?:{'|'.join(errno.errorcode[number] for number in _NUMBERS)})\b"
    rf"|{'|'.join(map(re.escape, [*map(os.strerror, _NUMBERS), *MACHINE_TEXTS]))}"
)
_EXCEPTION = re.compile(r"([\w.]*(?:Error|Exception))(?:: |$)")


def failure_of_policy(failure: BaseException, retry_on: tuple[type[BaseException], ...] = ()) -> AgentFailure | None:
    """None for a failure of the infrastructure."""
    if isinstance(failure, AgentFailed):
        return failure.failure
    if isinstance(failure, retry_on):
        return None
    if isinstance(failure, BaseExceptionGroup):
        kinds = [failure_of_policy(member, retry_on) for member in failure.exceptions]
        return None if None in kinds else kinds[0]
    if isinstance(failure, ContextLengthExceeded) or any(text in str(failure) for text in OVERFLOW_TEXTS):
        return AgentFailure.CONTEXT_OVERFLOW
    if _is_of_infrastructure(failure):
        return None
    return AgentFailure.TOO_LONG if _is_timeout(failure) else AgentFailure.ERROR


def cause_of(failure: BaseException) -> str:
    """The exception's type, by which failures are counted: of a process, the one that it wrote. Empty if the agent
    names the failure itself, takes too long or overflows the context."""
    match failure:
        case AgentFailed(failure=AgentFailure.ERROR):
            told = _EXCEPTION.match(str(failure))
            return told[1] if told else ""
        case CommandFailed():
            told = _EXCEPTION.match(failure.last_line)
            return told[1] if told else type(failure).__name__
        case BaseExceptionGroup():
            return cause_of(failure.exceptions[0])
    return type(failure).__name__ if failure_of_policy(failure) in (None, AgentFailure.ERROR) else ""


def is_machine_fault(failure: BaseException) -> bool:
    """Whether this machine is at fault. Its network and missing programs do not count here: a tool may be called with
    an address or a program that the model names."""
    if _is_of_generated_code(failure):
        return False
    match failure:
        case OSError(errno=int(number)):
            return number in MACHINE_ERRNOS
        case RuntimeError():
            return str(failure) in MACHINE_TEXTS
    return isinstance(failure, MACHINE_EXCEPTIONS)


def tells_machine_fault(text: str) -> bool:
    """Whether another process says, in the line that it ends with, that its machine or the network is at fault."""
    return _TOLD.search(text) is not None


def _is_of_infrastructure(failure: BaseException) -> bool:
    match failure:
        case StepwellError():
            return not isinstance(failure, OF_THE_POLICY)
        case object(status_code=int(status)) | object(status=int(status)):  # clients' exceptions have no common class
            return status not in CONTENT_STATUSES
        case CommandFailed():
            return failure.code is None or failure.code in MACHINE_EXIT_CODES or tells_machine_fault(failure.last_line)
        case subprocess.CalledProcessError():
            return failure.returncode in MACHINE_EXIT_CODES and _runs_container(failure.cmd)
        case URLError(reason=BaseException() as reason):
            return _is_of_infrastructure(reason)
        case ConnectionError() | socket.gaierror() | aiohttp.ConnectionTimeoutError():
            return True
        case OSError() if failure.errno in NETWORK_ERRNOS or _is_of_missing_program(failure):
            return True
    if is_machine_fault(failure) or (failure.__cause__ is not None and _is_of_infrastructure(failure.__cause__)):
        return True
    return type(failure).__module__.partition(".")[0] in HTTP_PACKAGES and not _is_timeout(failure)


def _is_timeout(failure: BaseException) -> bool:
    return isinstance(failure, TimeoutError) or type(failure).__name__ in TIMEOUTS


def _is_of_missing_program(failure: OSError) -> bool:
    """Whether subprocess could not start a program that the agent's own code names."""
    *_, last = [None, *traceback.walk_tb(failure.__traceback__)]
    return last is not None and last[0].f_code.co_name == "_execute_child" and not _is_of_generated_code(failure)


def _is_of_generated_code(failure: BaseException) -> bool:
    return any(f.f_code.co_filename == GENERATED_CODE for f, _ in traceback.walk_tb(failure.__traceback__))


def _runs_container(command: object) -> bool:
    words = command.split() if isinstance(command, str) else command
    match words:
        case [program, "run", *_]:
            return os.path.basename(str(program)) in CONTAINER_PROGRAMS
    return False
