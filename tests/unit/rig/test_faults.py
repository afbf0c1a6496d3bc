"""Each fault of the fake engine does what it says, and only that."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rig.calls import DONE, Answer, call, get, post
from rig.fake_engine import FakeEngine, Faults, Reply

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
EXACT: dict[str, Any] = {"return_token_ids": True, "max_tokens": 6}
CHAT_ASKED = EXACT | {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "logprobs": True}
STREAMED = CHAT_ASKED | {"stream": True, "stream_options": {"include_usage": True}}
TOKENS_ASKED = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 6, "logprobs": 0}}


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine() as engine:
        yield engine


async def chat_choice(engine: FakeEngine) -> Any:
    return (await post(engine.url + CHAT, CHAT_ASKED)).json()["choices"][0]


async def test_delay_comes_before_the_answer(engine: FakeEngine) -> None:
    engine.faults = Faults(delay_s=0.05)
    started = time.monotonic()
    async with aiohttp.ClientSession() as session, session.post(engine.url + CHAT, json=STREAMED):
        assert time.monotonic() - started >= 0.05


@pytest.mark.parametrize("asked", [CHAT_ASKED, STREAMED])
async def test_token_delay_comes_between_tokens(engine: FakeEngine, asked: Any) -> None:
    engine.faults = Faults(token_delay_s=0.01)
    started = time.monotonic()
    await post(engine.url + CHAT, asked)
    assert time.monotonic() - started >= 5 * 0.01


async def test_hanging_up_leaves_no_answer(engine: FakeEngine) -> None:
    engine.faults = Faults(hang_up=True)
    with pytest.raises(aiohttp.ServerDisconnectedError):
        await post(engine.url + CHAT, CHAT_ASKED)


async def test_silence_comes_at_its_token(engine: FakeEngine) -> None:
    engine.faults = Faults(silent_s=1.0, silent_at_token=2)
    async with aiohttp.ClientSession() as session, session.post(engine.url + CHAT, json=STREAMED) as reply:
        at = [time.monotonic() async for line in reply.content if line.startswith(b"data: {")]
    gaps = [after - before for before, after in pairwise(at)]
    assert gaps[2] >= 0.5, "the chunks of the opening and of two tokens come before"
    assert sum(gaps) - gaps[2] < gaps[2]


async def test_awkward_splits_change_no_byte(engine: FakeEngine) -> None:
    engine.replies.extend([Reply("zwölf 🐘", ()), Reply("zwölf 🐘", ())])
    plain = await post(engine.url + CHAT, STREAMED | {"max_tokens": 100})
    engine.faults = Faults(awkward_splits=True)
    received: list[bytes] = []
    asked = STREAMED | {"max_tokens": 100}
    async with aiohttp.ClientSession() as session, session.post(engine.url + CHAT, json=asked) as reply:
        async for piece, _ in reply.content.iter_chunks():
            received.append(piece)
    whole = b"".join(received).decode()
    texts = [[chunk["choices"] for chunk in answer.chunks()] for answer in (plain, Answer(200, whole))]
    assert texts[0] == texts[1]
    assert any(piece.endswith(b"dat") for piece in received)
    assert any(piece[:1] > b"\x7f" and piece[0] & 0xC0 == 0x80 for piece in received)
    assert any(piece.endswith(b"}\n") for piece in received)


@pytest.mark.parametrize("asked", [CHAT_ASKED, STREAMED])
async def test_invalid_utf8(engine: FakeEngine, asked: Any) -> None:
    engine.faults = Faults(invalid_utf8=True)
    async with aiohttp.ClientSession() as session, session.post(engine.url + CHAT, json=asked) as reply:
        raw = await reply.read()
    with pytest.raises(UnicodeDecodeError):
        raw.decode()
    assert raw.decode(errors="ignore").startswith(("data: {", "{"))


@pytest.mark.parametrize("status", [400, 500, 503])
async def test_error_status(engine: FakeEngine, status: int) -> None:
    engine.faults = Faults(error_status=status)
    answer = await post(engine.url + CHAT, CHAT_ASKED)
    assert (answer.status, answer.json()["error"]["code"]) == (status, status)


@pytest.mark.parametrize("at", [0, 3])
async def test_error_at_token(engine: FakeEngine, at: int) -> None:
    engine.faults = Faults(error_at_token=at)
    choice = await chat_choice(engine)
    streamed = await post(engine.url + CHAT, STREAMED)
    *chunks, error = streamed.chunks()
    assert (choice["finish_reason"], len(choice["token_ids"])) == ("error", at)
    assert error["error"]["code"] == 500
    assert len(chunks) == 1 + at
    assert not any(choice["finish_reason"] for chunk in chunks for choice in chunk["choices"])
    assert streamed.events()[-1] == DONE


@pytest.mark.parametrize("at", [0, 3])
async def test_abort_at_token(engine: FakeEngine, at: int) -> None:
    engine.faults = Faults(abort_at_token=at)
    choice = await chat_choice(engine)
    *_, last, _usage = (await post(engine.url + CHAT, STREAMED)).chunks()
    assert (choice["finish_reason"], len(choice["token_ids"])) == ("abort", at)
    assert last["choices"][0]["finish_reason"] == "abort"


async def test_disconnect_before_the_body(engine: FakeEngine) -> None:
    engine.faults = Faults(disconnect_at_token=0)
    with pytest.raises(aiohttp.ClientPayloadError):
        await post(engine.url + CHAT, CHAT_ASKED)


async def test_disconnect_in_the_stream(engine: FakeEngine) -> None:
    engine.faults = Faults(disconnect_at_token=2, token_delay_s=0.01)
    received = bytearray()

    async def read(reply: aiohttp.ClientResponse) -> None:
        async for piece in reply.content.iter_any():
            received.extend(piece)

    async with aiohttp.ClientSession() as session, session.post(engine.url + CHAT, json=STREAMED) as reply:
        with pytest.raises(aiohttp.ClientPayloadError):
            await read(reply)
    assert received.count(b"data: ") == 1 + 2


async def test_drop_ids(engine: FakeEngine) -> None:
    engine.faults = Faults(drop_ids=True)
    choice = await chat_choice(engine)
    assert choice["token_ids"] is None
    assert len(choice["logprobs"]["content"]) == 6
    _, *tokens, _ = (await post(engine.url + CHAT, STREAMED)).chunks()
    assert {chunk["choices"][0]["token_ids"] for chunk in tokens} == {None}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, GENERATE])
async def test_short_ids(engine: FakeEngine, path: str) -> None:
    engine.faults = Faults(short_ids=True)
    asked = CHAT_ASKED | TOKENS_ASKED | {"prompt": "hi"}
    choice = (await post(engine.url + path, asked)).json()["choices"][0]
    assert len(choice["token_ids"]) == 5


async def test_short_ids_in_a_stream(engine: FakeEngine) -> None:
    engine.faults = Faults(short_ids=True)
    _, *tokens, _ = (await post(engine.url + CHAT, STREAMED)).chunks()
    choices = [chunk["choices"][0] for chunk in tokens]
    assert [len(choice["token_ids"]) for choice in choices] == [1, 1, 1, 1, 1, 0]
    assert [len(choice["logprobs"]["content"]) for choice in choices] == [1] * 6


@pytest.mark.parametrize(("value", "sent"), [(-9999.0, -9999.0), (0.5, 0.5), (float("nan"), None)])
async def test_logprob_value(engine: FakeEngine, value: float, sent: float | None) -> None:
    engine.faults = Faults(logprob_value=value)
    choice = await chat_choice(engine)
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]].index(sent) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_version_change_at_token(engine: FakeEngine, stream: bool) -> None:
    engine.faults = Faults(version_change_at_token=2, new_version="8")
    answer = await post(engine.url + GENERATE, TOKENS_ASKED | {"stream": stream})
    last = answer.chunks()[-1] if stream else answer.json()
    spans = [{"version": "default", "start": 0, "end": 2}, {"version": "8", "start": 2, "end": 6}]
    assert last["choices"][0]["weight_versions"] == spans
    assert (await get(f"{engine.url}/weight_info")).json() == {"weight_version": "8"}


async def test_wrong_usage(engine: FakeEngine) -> None:
    engine.faults = Faults(wrong_usage=True)
    assert (await post(engine.url + CHAT, CHAT_ASKED)).json()["usage"]["completion_tokens"] == 7
    assert (await post(engine.url + CHAT, STREAMED)).chunks()[-1]["usage"]["completion_tokens"] == 7


async def test_malformed_as_no_json(engine: FakeEngine) -> None:
    engine.faults = Faults(malformed="not_json")
    answer, streamed = await post(engine.url + CHAT, CHAT_ASKED), await post(engine.url + CHAT, STREAMED)
    assert answer.status == streamed.status == 200
    with pytest.raises(ValueError, match="Unterminated|Expecting"):
        answer.json()
    with pytest.raises(ValueError, match="Unterminated|Expecting"):
        streamed.chunks()


async def test_malformed_without_choices(engine: FakeEngine) -> None:
    engine.faults = Faults(malformed="no_choices")
    assert "choices" not in (await post(engine.url + CHAT, CHAT_ASKED)).json()
    assert not any("choices" in chunk for chunk in (await post(engine.url + CHAT, STREAMED)).chunks())


async def test_no_done(engine: FakeEngine) -> None:
    engine.faults = Faults(no_done=True)
    assert DONE not in (await post(engine.url + CHAT, STREAMED)).events()


async def test_times_lets_later_requests_through(engine: FakeEngine) -> None:
    engine.faults = Faults(error_status=503, times=2)
    assert [(await post(engine.url + CHAT, CHAT_ASKED)).status for _ in range(4)] == [503, 503, 200, 200]


async def test_faults_are_set_over_http(engine: FakeEngine) -> None:
    faults = {"logprob_value": float("nan"), "error_status": 500, "times": 1}
    assert (await call("PUT", f"{engine.url}/fake/faults", faults)).status == 200
    assert (engine.faults.error_status, engine.faults.times) == (500, 1)
    state = (await get(f"{engine.url}/fake/state")).json()
    assert (state["requests"], state["faults"]["error_status"]) == (0, 500)


async def test_unknown_faults_are_refused(engine: FakeEngine) -> None:
    answer = await call("PUT", f"{engine.url}/fake/faults", {"no_such": 1})
    assert answer.status == 400
    assert "no_such" in answer.json()["error"]["message"]


async def test_it_runs_as_a_process_of_its_own() -> None:
    checkout = Path(__file__).parents[3]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rig.fake_engine", stdout=asyncio.subprocess.PIPE, cwd=checkout
    )
    assert process.stdout
    try:
        url = (await process.stdout.readline()).decode().strip()
        assert (await post(url + CHAT, CHAT_ASKED)).status == 200
    finally:
        process.terminate()
        await process.wait()
