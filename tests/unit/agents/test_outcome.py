import socket
import subprocess
from typing import Any

import aiohttp
import httpx
import openai
import pytest

from stepwell.agents.outcome import AgentFailed, AgentFailure, failure_of_policy
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
    ],
)
def test_what_the_infrastructure_causes_is_not(failure: Exception) -> None:
    assert failure_of_policy(failure) is None


def test_the_user_names_what_else_is_not() -> None:
    assert failure_of_policy(KeyError("sandbox"), retry_on=(LookupError,)) is None
    assert failure_of_policy(AgentFailed("error"), retry_on=(Exception,)) is AgentFailure.ERROR
