import asyncio
import errno
import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import URLError

import aiohttp
import httpx
import openai
import pytest

from stepwell.agents.outcome import (
    MACHINE_ERRNOS,
    NETWORK_ERRNOS,
    AgentFailed,
    AgentFailure,
    cause_of,
    failure_of_policy,
    is_machine_fault,
    tells_machine_fault,
)
from stepwell.common.processes import CommandFailed
from stepwell.errors import (
    BadRequest,
    Conflict,
    ContextLengthExceeded,
    EngineUnavailable,
    GatewayUnreachable,
    PoolFull,
    TooLarge,
)

REQUEST: Any = httpx.Request("POST", "http://gateway/v1/chat/completions")


def answered(status: int, text: str = "no") -> openai.APIStatusError:
    kinds = {400: openai.BadRequestError, 409: openai.ConflictError, 429: openai.RateLimitError}
    kind = kinds.get(status, openai.InternalServerError)
    response: Any = httpx.Response(status, request=REQUEST)
    return kind(text, response=response, body=None)


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (AgentFailed("gave_up"), AgentFailure.GAVE_UP),
        (TimeoutError(), AgentFailure.TOO_LONG),
        (openai.APITimeoutError(REQUEST), AgentFailure.TOO_LONG),
        (httpx.ReadTimeout(""), AgentFailure.TOO_LONG),
        (subprocess.TimeoutExpired("tool", 3), AgentFailure.TOO_LONG),
        (ContextLengthExceeded("no"), AgentFailure.CONTEXT_OVERFLOW),
        (answered(400, "This model's maximum context length is 8 tokens."), AgentFailure.CONTEXT_OVERFLOW),
        (RuntimeError("code 1: context_length_exceeded"), AgentFailure.CONTEXT_OVERFLOW),
        (answered(400), AgentFailure.ERROR),
        (BadRequest("no"), AgentFailure.ERROR),
        (TooLarge("no"), AgentFailure.ERROR),
        (FileNotFoundError("what the model named"), AgentFailure.ERROR),
        (KeyError("answer"), AgentFailure.ERROR),
        (PermissionError(errno.EACCES, "what the model named"), AgentFailure.ERROR),
        (RuntimeError("no more threads"), AgentFailure.ERROR),
        (URLError("unknown url type: model"), AgentFailure.ERROR),
        (CommandFailed("no", code=1, last_line="KeyError: 'answer'"), AgentFailure.ERROR),
        (subprocess.CalledProcessError(127, ["bash", "-c", "what the model wrote"]), AgentFailure.ERROR),
        (subprocess.CalledProcessError(1, ["docker", "run", "image"]), AgentFailure.ERROR),
        (ExceptionGroup("two", [KeyError("answer"), TimeoutError()]), AgentFailure.ERROR),
    ],
)
def test_what_the_policy_causes_is_its_failure(failure: Exception, kind: AgentFailure) -> None:
    assert failure_of_policy(failure) is kind


@pytest.mark.parametrize(
    "failure",
    [
        answered(409),
        answered(429),
        answered(500),
        openai.APIConnectionError(request=REQUEST),
        httpx.ConnectTimeout(""),
        httpx.ReadError(""),
        aiohttp.ConnectionTimeoutError(),
        aiohttp.ServerDisconnectedError(),
        ConnectionResetError(),
        socket.gaierror(),
        Conflict("late"),
        EngineUnavailable("no"),
        GatewayUnreachable("no"),
        PoolFull("no"),
        MemoryError(),
        ImportError("x"),
        ModuleNotFoundError("No module named 'x'"),
        *(OSError(number, os.strerror(number)) for number in [*MACHINE_ERRNOS, *NETWORK_ERRNOS]),
        RuntimeError("can't start new thread"),
        URLError(OSError(errno.EHOSTUNREACH, "No route to host")),
        CommandFailed("agent cannot be started: no such file"),
        CommandFailed("no", code=127, last_line="sh: 1: agent: not found"),
        CommandFailed("no", code=1, last_line="OSError: [Errno 28] No space left on device: 'x'"),
        CommandFailed("no", code=1, last_line="Error: EMFILE: too many open files, open 'x'"),
        CommandFailed("no", code=1, last_line="ModuleNotFoundError: No module named 'x'"),
        *(subprocess.CalledProcessError(code, ["/usr/bin/docker", "run", "image"]) for code in (125, 126, 127)),
        subprocess.CalledProcessError(125, "docker run image"),
        ExceptionGroup("two", [KeyError("answer"), ConnectionResetError()]),
    ],
)
def test_what_the_infrastructure_causes_is_not(failure: Exception) -> None:
    assert failure_of_policy(failure) is None


def test_the_user_names_what_else_is_not() -> None:
    assert failure_of_policy(KeyError("sandbox"), retry_on=(LookupError,)) is None
    assert failure_of_policy(AgentFailed("error"), retry_on=(Exception,)) is AgentFailure.ERROR


def raised(act: Callable[[], object]) -> BaseException:
    try:
        act()
    except Exception as failure:  # noqa: BLE001 - whatever it is
        return failure
    raise AssertionError("it raises")


def test_a_program_that_is_missing_is_not_the_policys() -> None:
    missing = raised(lambda: subprocess.run(["no/such/docker", "run"], check=True))
    assert failure_of_policy(missing) is None
    assert failure_of_policy(raised(lambda: asyncio.run(asyncio.create_subprocess_exec("no/such/docker")))) is None
    assert failure_of_policy(raised(lambda: Path("no/such/file").read_text())) is AgentFailure.ERROR
    assert not is_machine_fault(missing), "a tool may be asked for it by the model"


def wrapped() -> None:
    try:
        raise OSError(errno.ENOSPC, "No space left on device")
    except OSError as full:
        raise RuntimeError("the tool failed") from full


def test_an_exception_is_what_caused_it() -> None:
    assert failure_of_policy(raised(wrapped)) is None


@pytest.mark.parametrize(
    "code", ["import no_such_package", "raise MemoryError", "import subprocess; subprocess.run(['no/such/program'])"]
)
def test_what_generated_code_raises_is_the_policys(code: str) -> None:
    failure = raised(lambda: exec(code, {}))
    assert failure_of_policy(failure) is AgentFailure.ERROR
    assert not is_machine_fault(failure)


def test_a_framework_may_wrap_a_fault_of_the_machine() -> None:
    assert tells_machine_fault("TaskError: cannot score: ModuleNotFoundError: No module named 'x'")
    assert tells_machine_fault("HarnessError: docker: no space: [Errno 28] No space left on device")
    assert not tells_machine_fault("TaskError: the model wrote no ImportError")


@pytest.mark.parametrize(
    ("failure", "cause"),
    [
        (KeyError("answer"), "KeyError"),
        (OSError(errno.ENOSPC, "full"), "OSError"),
        (ExceptionGroup("two", [KeyError("answer"), ValueError()]), "KeyError"),
        (
            CommandFailed("no", code=1, last_line="json.JSONDecodeError: Expecting"),
            "json.JSONDecodeError",
        ),
        (CommandFailed("no", code=1, last_line="no idea"), "CommandFailed"),
        (AgentFailed("error", "TaskError: it cannot be scored"), "TaskError"),
        (AgentFailed("error"), ""),
        (AgentFailed("gave_up", "KeyError: no"), ""),
        (TimeoutError(), ""),
        (ContextLengthExceeded("no"), ""),
    ],
)
def test_failures_are_counted_by_their_exception(failure: Exception, cause: str) -> None:
    assert cause_of(failure) == cause
