"""What the fake engine answers when all is well; its shapes are held against vLLM's in tests/e2e."""

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from tests.rig.calls import DONE, get, post
from tests.rig.fake_engine import FakeEngine, Reply, ToolCall
from tests.rig.threads import in_thread
from tests.rig.vocabulary import END_OF_TURN, encode, pieces

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
MESSAGES = [{"role": "user", "content": "hi"}]
ASKED: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12}
EXACT: dict[str, Any] = ASKED | {"return_token_ids": True, "logprobs": True}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine() as engine:
        yield engine


async def test_chat_is_token_exact_when_asked(engine: FakeEngine) -> None:
    answer = (await post(engine.url + CHAT, EXACT)).json()
    choice = answer["choices"][0]
    assert answer["prompt_token_ids"] == encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert "".join(pieces(choice["token_ids"])) == choice["message"]["content"]
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) == answer["usage"]["completion_tokens"]
    assert all(-8 < entry["logprob"] < 0 for entry in choice["logprobs"]["content"])


async def test_ids_and_logprobs_stay_away_unless_asked_for(engine: FakeEngine) -> None:
    answer = (await post(engine.url + CHAT, ASKED)).json()
    assert answer["prompt_token_ids"] is answer["choices"][0]["token_ids"] is answer["choices"][0]["logprobs"] is None


async def test_a_stream_says_what_the_whole_answer_says(engine: FakeEngine) -> None:
    whole = (await post(engine.url + CHAT, EXACT)).json()
    streamed = await post(engine.url + CHAT, EXACT | {"stream": True, "stream_options": {"include_usage": True}})
    first, *tokens, last = streamed.chunks()
    choices = [chunk["choices"][0] for chunk in tokens]
    assert streamed.events()[-1] == DONE
    assert first["prompt_token_ids"] == whole["prompt_token_ids"]
    assert [i for choice in choices for i in choice["token_ids"]] == whole["choices"][0]["token_ids"]
    entries = [entry for choice in choices for entry in choice["logprobs"]["content"]]
    assert entries == whole["choices"][0]["logprobs"]["content"]
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    assert text == whole["choices"][0]["message"]["content"]
    assert last["usage"].items() <= whole["usage"].items()


async def test_replies_end_by_themselves_or_at_max_tokens(engine: FakeEngine) -> None:
    long = (await post(engine.url + CHAT, EXACT | {"max_tokens": 100})).json()["choices"][0]
    short = (await post(engine.url + CHAT, EXACT | {"max_tokens": 2})).json()["choices"][0]
    assert (long["finish_reason"], long["token_ids"][-1]) == ("stop", END_OF_TURN)
    assert (short["finish_reason"], len(short["token_ids"])) == ("length", 2)
    assert short["token_ids"] == long["token_ids"][:2]


async def test_ignore_eos_fills_max_tokens(engine: FakeEngine) -> None:
    answer = (await post(engine.url + CHAT, EXACT | {"max_tokens": 500, "ignore_eos": True})).json()
    assert answer["usage"]["completion_tokens"] == 500


async def test_the_reply_follows_from_prompt_and_seed(engine: FakeEngine) -> None:
    async def ids(**changes: Any) -> list[int]:
        answer = await post(engine.url + CHAT, EXACT | changes)
        found: list[int] = answer.json()["choices"][0]["token_ids"]
        return found

    assert await ids(seed=1) == await ids(seed=1)
    assert await ids(seed=1) != await ids(seed=2)
    assert await ids(seed=1) != await ids(seed=1, messages=[{"role": "user", "content": "ho"}])


@pytest.mark.parametrize("stream", [False, True])
async def test_n_choices_differ(engine: FakeEngine, stream: bool) -> None:
    answer = await post(engine.url + CHAT, EXACT | {"n": 3, "stream": stream})
    ids: dict[int, list[int]] = {}
    for payload in answer.chunks() if stream else [answer.json()]:
        for choice in payload["choices"]:
            ids.setdefault(choice["index"], []).extend(choice.get("token_ids", []))
    assert sorted(ids) == [0, 1, 2]
    assert len({tuple(found) for found in ids.values()}) == 3


async def test_a_prompt_may_be_text_or_ids(engine: FakeEngine) -> None:
    asked = {"model": "tiny", "return_token_ids": True, "logprobs": 1}
    as_text = (await post(engine.url + COMPLETIONS, asked | {"prompt": "hi"})).json()["choices"][0]
    as_ids = (await post(engine.url + COMPLETIONS, asked | {"prompt": list(b"hi")})).json()["choices"][0]
    assert as_text == as_ids
    assert as_ids["prompt_token_ids"] == list(b"hi")
    assert len(as_ids["logprobs"]["token_logprobs"]) == len(as_ids["token_ids"])


async def test_generate_takes_and_gives_tokens(engine: FakeEngine) -> None:
    engine.weight_version = "3"
    asked = {"token_ids": list(b"hi"), "sampling_params": {"max_tokens": 5, "logprobs": 0}}
    choice = (await post(engine.url + GENERATE, asked)).json()["choices"][0]
    assert choice["weight_versions"] == [{"version": "3", "start": 0, "end": 5}]
    assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == choice["token_ids"]


async def test_canned_replies_come_in_order_and_then_the_hash(engine: FakeEngine) -> None:
    engine.replies.extend([Reply("one"), Reply("zwölf")])
    texts = [(await post(engine.url + CHAT, EXACT)).json()["choices"][0]["message"]["content"] for _ in range(3)]
    assert texts[:2] == ["one", "zwölf"]
    assert re.fullmatch("[a-z .]{12}", texts[2])


async def test_a_canned_call_is_lifted_out_of_the_text() -> None:
    reply = Reply("Let me see.", (ToolCall("add", {"a": 1}), ToolCall("add", {"a": 2})))
    async with FakeEngine(replies=[reply]) as engine:
        asked = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "return_token_ids": True}
        choice = (await post(engine.url + CHAT, asked)).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == ['{"a": 1}', '{"a": 2}']
    assert "".join(pieces(choice["token_ids"])).count("<tool_call>") == 2


async def test_a_canned_call_streams_as_deltas() -> None:
    async with FakeEngine(replies=[Reply("Hm.", (ToolCall("add", {"a": 1}),))]) as engine:
        asked = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "return_token_ids": True, "stream": True}
        _, *tokens = (await post(engine.url + CHAT, asked)).chunks()
    choices = [chunk["choices"][0] for chunk in tokens]
    named, argued = [delta for choice in choices for delta in choice["delta"].get("tool_calls", [])]
    assert (named["function"]["name"], argued["function"]["arguments"]) == ("add", '{"a": 1}')
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == "Hm."
    assert choices[-1]["finish_reason"] == "tool_calls"
    assert all(len(choice["token_ids"]) == 1 for choice in choices)


async def test_without_tools_a_call_is_text() -> None:
    async with FakeEngine(replies=[Reply("", (ToolCall("add", {}),))]) as engine:
        choice = (await post(engine.url + CHAT, {"model": "tiny", "messages": MESSAGES})).json()["choices"][0]
    assert choice["message"]["content"] == '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("asked", "status", "param"),
    [
        (ASKED | {"model": "another"}, 404, "model"),
        ({"model": "tiny"}, 400, "body.messages"),
        (ASKED | {"messages": [{"role": "user", "content": "x" * 40_000}]}, 400, "input_tokens"),
        (ASKED | {"max_tokens": 40_000}, 400, "max_tokens"),
    ],
)
async def test_refusals_are_error_objects(engine: FakeEngine, asked: Any, status: int, param: str) -> None:
    answer = await post(engine.url + CHAT, asked)
    assert answer.status == status
    assert answer.json()["error"]["code"] == status
    assert answer.json()["error"]["param"] == param


async def test_it_tells_about_itself(engine: FakeEngine) -> None:
    assert (await get(f"{engine.url}/health")).status == 200
    assert (await get(f"{engine.url}/version")).json() == {"version": "0.32.0"}
    assert (await get(f"{engine.url}/v1/models")).json()["data"][0]["max_model_len"] == engine.max_model_len


async def test_the_weight_version_is_set_over_http(engine: FakeEngine) -> None:
    await post(f"{engine.url}/update_weight_version", {"new_version": "7"})
    assert (await get(f"{engine.url}/weight_info")).json() == {"weight_version": "7"}


async def test_a_pause_holds_generations_until_resume(engine: FakeEngine) -> None:
    await post(f"{engine.url}/pause?mode=keep")
    held = asyncio.create_task(post(engine.url + CHAT, ASKED))
    while engine.in_flight == 0:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)
    assert not held.done()
    await post(f"{engine.url}/resume")
    assert (await held).status == 200
    assert engine.in_flight == 0


async def test_it_remembers_what_was_asked(engine: FakeEngine) -> None:
    await post(engine.url + CHAT, ASKED)
    await post(f"{engine.url}/pause?mode=keep")
    assert [(seen.path, seen.body) for seen in engine.requests] == [(CHAT, ASKED), ("/pause?mode=keep", {})]
    assert engine.request_count == 2


async def test_it_notices_a_client_that_goes_away(engine: FakeEngine) -> None:
    engine.pause()
    with pytest.raises(asyncio.TimeoutError):
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(0.05)) as session:
            await session.post(engine.url + CHAT, json=ASKED)
    while engine.in_flight:
        await asyncio.sleep(0.001)
    assert engine.disconnects == 1


def test_it_serves_tests_without_an_event_loop() -> None:
    with in_thread(FakeEngine(replies=["hello"])) as engine:
        answer = asyncio.run(post(engine.url + CHAT, ASKED)).json()
    assert answer["choices"][0]["message"]["content"] == "hello"
    assert engine.request_count == 1
