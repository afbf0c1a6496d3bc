import json

import pytest
from stepwell.gateway.error_responses import (
    CONTEXT_OVERFLOW,
    ErrorDetails,
    describe,
    describe_refusal,
    describe_stream_error,
    openai_error,
)

from stepwell.errors import BadRequest, EngineUnavailable, PoolFull, RayUnreachable

NO_ROOM = b'{"error": {"message": "maximum context length is 64", "code": 400}}'


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (BadRequest("n"), 400, "bad_request"),
        (EngineUnavailable("n"), 502, "engine_unavailable"),
        (RayUnreachable("n"), 500, "ray_unreachable"),
    ],
)
def test_a_failure_has_the_status_of_its_class_and_its_own_text(failure: Exception, status: int, code: str) -> None:
    assert describe(failure) == ErrorDetails(status, "n", code)


def test_a_full_pool_says_when_to_come_back() -> None:
    assert describe(PoolFull("full")).headers == {"Retry-After": "5"}


def test_the_text_of_an_unforeseen_failure_is_not_shown() -> None:
    error = describe(ValueError("a secret"))
    assert (error.status, error.code) == (500, "internal_error")
    assert "secret" not in error.message


@pytest.mark.parametrize(
    ("status", "body", "shown", "code"),
    [
        (404, b'{"error": {"message": "no such model", "code": 404}}', 404, "404"),
        (400, NO_ROOM, 400, CONTEXT_OVERFLOW),
        (401, b'{"error": {"message": "whose key?"}}', 502, "engine_unavailable"),
        (502, b"<html>", 502, "engine_unavailable"),
        (500, b'{"error": "text"}', 502, "engine_unavailable"),
    ],
)
def test_an_engines_refusal_is_shown_if_it_is_an_error_object(status: int, body: bytes, shown: int, code: str) -> None:
    error = describe_refusal(status, body)
    assert (error.status, error.code) == (shown, code)
    assert (openai_error(error) == body) is (status == 404)


def test_an_error_within_a_stream_is_shown_as_the_engine_wrote_it() -> None:
    for chunk, message in (({"error": {"message": "no memory"}}, "no memory"), ({"error": "no"}, "no")):
        error = describe_stream_error(chunk)
        assert (error.message, json.loads(openai_error(error))) == (message, chunk)
