"""What the fake engine answers when all is well; its shapes are held against vLLM's in tests/e2e."""

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from rig.calls import DONE, get, post
from rig.fake_engine import FakeEngine, Faults, Reply, ToolCall
from rig.threads import in_thread
from rig.vocabulary import END_OF_TURN, encode, pieces
from rig.waiting import until

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


@pytest.mark.parametrize(("raw", "expected"), [(False, 0.5), (True, 1.0)])
async def test_log_probabilities_follow_the_temperature_alternatives_too(
    engine: FakeEngine, raw: bool, expected: float
) -> None:
    engine.faults = Faults(raw_logprobs=raw)
    gaps = []
    for temperature in (1.0, 2.0):
        answer = (await post(engine.url + CHAT, EXACT | {"temperature": temperature, "top_logprobs": 2})).json()
        first, second = (one["logprob"] for one in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"])
        gaps.append(first - second)
    assert gaps[1] / gaps[0] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (CHAT, EXACT),
        (COMPLETIONS, {"model": "tiny", "prompt": "hi", "max_tokens": 12, "logprobs": 0}),
        (GENERATE, {"token_ids": [5], "sampling_params": {"max_tokens": 12, "logprobs": 0}}),
    ],
    ids=("chat", "completions", "generate"),
)
async def test_a_sampled_token_has_the_log_probability_of_its_temperature_however_it_is_asked_for(
    engine: FakeEngine, path: str, asked: dict[str, Any]
) -> None:
    told: dict[float, list[float]] = {}
    for temperature in (1.0, 0.5, 0.0):
        engine.replies.append(Reply("four"))
        hot = {"temperature": temperature}
        body = asked | hot | ({"sampling_params": asked["sampling_params"] | hot} if path == GENERATE else {})
        logprobs = (await post(engine.url + path, body)).json()["choices"][0]["logprobs"]
        told[temperature] = logprobs.get("token_logprobs") or [entry["logprob"] for entry in logprobs["content"]]
    assert len(told[1.0]) > 1
    assert told[0.5] == pytest.approx([2 * logprob for logprob in told[1.0]])
    assert told[0.0] == told[1.0], "greedy sampling scales nothing"


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


@pytest.mark.parametrize("stream", [False, True])
async def test_a_pause_that_aborts_ends_what_is_in_flight_and_holds_the_rest(engine: FakeEngine, stream: bool) -> None:
    engine.faults = Faults(token_delay_s=0.01)
    long = EXACT | {"max_tokens": 1000, "ignore_eos": True, "stream": stream, "stream_options": {"include_usage": True}}
    running = asyncio.create_task(post(engine.url + CHAT, long))
    await until(lambda: engine.in_flight == 1, "the call")
    await asyncio.sleep(0.05)
    assert (await post(f"{engine.url}/pause?clear_cache=false")).json() == {"status": "paused"}
    answer = await asyncio.wait_for(running, 5)
    if stream:
        _, *tokens, usage = answer.chunks()
        ids = [i for chunk in tokens for i in chunk["choices"][0]["token_ids"]]
        last, counted = tokens[-1]["choices"][0], usage["usage"]["completion_tokens"]
        assert (last["token_ids"], last["delta"], answer.events()[-1]) == ([], {}, DONE)
    else:
        last, counted = answer.json()["choices"][0], answer.json()["usage"]["completion_tokens"]
        ids = last["token_ids"]
    assert last["finish_reason"] == "abort"
    assert 1 <= len(ids) == counted < 1000
    later = asyncio.create_task(post(engine.url + CHAT, EXACT))
    await until(lambda: engine.in_flight == 1, "the next call")
    assert (await get(f"{engine.url}/is_paused")).json() == {"is_paused": True}
    assert not later.done()
    await post(f"{engine.url}/resume")
    assert (await later).json()["choices"][0]["finish_reason"] == "length"


async def test_a_pause_that_waits_lets_what_is_in_flight_end(engine: FakeEngine) -> None:
    engine.faults = Faults(token_delay_s=0.01)
    running = asyncio.create_task(post(engine.url + CHAT, EXACT | {"max_tokens": 20, "ignore_eos": True}))
    await until(lambda: engine.in_flight == 1, "the call")
    await asyncio.sleep(0.05)
    await post(f"{engine.url}/pause?mode=wait")
    assert engine.in_flight == 0
    choice = (await running).json()["choices"][0]
    assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", 20)


async def test_an_unknown_pause_is_refused(engine: FakeEngine) -> None:
    assert (await post(f"{engine.url}/pause?mode=soon")).status == 400
    assert not engine.is_paused


async def test_reasoning_is_told_apart_from_the_text(engine: FakeEngine) -> None:
    engine.replies.extend([Reply("Yes.", reasoning="Hm, é?")] * 2)
    whole = (await post(engine.url + CHAT, EXACT | {"max_tokens": 100})).json()["choices"][0]
    assert (whole["message"]["reasoning"], whole["message"]["content"]) == ("Hm, é?", "Yes.")
    assert "".join(pieces(whole["token_ids"])) == "<think>Hm, é?</think>Yes."
    _, *tokens = (await post(engine.url + CHAT, EXACT | {"max_tokens": 100, "stream": True})).chunks()
    choices = [chunk["choices"][0] for chunk in tokens]
    assert "".join(choice["delta"].get("reasoning", "") for choice in choices) == "Hm, é?"
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "Yes."
    assert [i for choice in choices for i in choice["token_ids"]] == whole["token_ids"]


async def test_reasoning_that_is_not_wanted_takes_ids_and_logprobs_with_it(engine: FakeEngine) -> None:
    engine.replies.extend([Reply("Yes.", reasoning="Hm?")] * 2)
    asked = EXACT | {"max_tokens": 100, "include_reasoning": False}
    whole = (await post(engine.url + CHAT, asked)).json()["choices"][0]
    assert (whole["message"]["reasoning"], whole["message"]["content"]) == (None, "Yes.")
    assert whole["token_ids"] is whole["logprobs"] is None
    _, *tokens = (await post(engine.url + CHAT, asked | {"stream": True})).chunks()
    choices = [chunk["choices"][0] for chunk in tokens]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "Yes."
    assert not any(choice["token_ids"] or choice["logprobs"] or "reasoning" in choice["delta"] for choice in choices)


async def test_tokens_are_derendered_into_the_reply_they_spell(engine: FakeEngine) -> None:
    reply = Reply("Let me see.", (ToolCall("add", {"a": 1}),), reasoning="Hm.")
    engine.replies.append(reply)
    asked = {"token_ids": list(b"hi"), "sampling_params": {"max_tokens": 200, "logprobs": 0}}
    generated = (await post(engine.url + GENERATE, asked)).json()
    chat = EXACT | {"tools": TOOLS}
    body = {"model": "tiny", "generate_response": generated, "prompt_tokens": 2, "chat_request": chat}
    answer = (await post(f"{engine.url}/v1/chat/completions/derender", body)).json()
    choice = answer["choices"][0]
    message = choice["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", "Let me see.")
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert choice["token_ids"] == generated["choices"][0]["token_ids"]
    assert len(choice["logprobs"]["content"]) == answer["usage"]["completion_tokens"] == len(choice["token_ids"])


async def test_an_end_of_turn_shows_in_what_is_derendered(engine: FakeEngine) -> None:
    generated = {"choices": [{"index": 0, "token_ids": [*encode("Yes."), END_OF_TURN], "finish_reason": "stop"}]}
    answer = await post(f"{engine.url}/v1/chat/completions/derender", {"generate_response": generated})
    assert answer.json()["choices"][0]["message"]["content"] == "Yes.<|im_end|>"


async def test_nothing_cannot_be_derendered(engine: FakeEngine) -> None:
    body = {"generate_response": {"choices": [{"index": 0, "token_ids": []}]}}
    assert (await post(f"{engine.url}/v1/chat/completions/derender", body)).status == 400


async def test_without_scale_out_its_routes_are_closed() -> None:
    async with FakeEngine(scale_out=False) as engine:
        for path in (GENERATE, "/v1/chat/completions/derender"):
            assert (await post(engine.url + path, {})).status == 403


async def test_a_plain_server_knows_nothing_of_vllms() -> None:
    async with FakeEngine(plain=True) as engine:
        for path in ("/version", "/health", "/weight_info", "/is_paused"):
            assert (await get(engine.url + path)).status == 404
        assert (await post(engine.url + GENERATE, {})).status == 404
        for name in ("return_token_ids", "top_k", "min_p", "repetition_penalty"):
            refused = await post(engine.url + CHAT, ASKED | {name: 1})
            assert (refused.status, refused.json()["error"]["param"]) == (400, name)
        assert "max_model_len" not in (await get(f"{engine.url}/v1/models")).json()["data"][0]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_plain_server_gives_logprobs_and_no_ids(stream: bool) -> None:
    async with FakeEngine(plain=True) as engine:
        answer = await post(engine.url + CHAT, ASKED | {"logprobs": True, "stream": stream})
    payloads = answer.chunks() if stream else [answer.json()]
    choices = [choice for payload in payloads for choice in payload["choices"]]
    assert sum(len(choice["logprobs"]["content"]) for choice in choices if choice["logprobs"]) == 12
    assert "token_ids" not in answer.text


async def test_it_remembers_what_was_asked(engine: FakeEngine) -> None:
    await post(engine.url + CHAT, ASKED)
    await post(f"{engine.url}/pause?mode=keep")
    assert [(seen.path, seen.body) for seen in engine.requests] == [(CHAT, ASKED), ("/pause?mode=keep", {})]
    assert engine.request_count == 2


async def test_questions_are_counted_and_not_remembered(engine: FakeEngine) -> None:
    await get(f"{engine.url}/weight_info")
    await get(f"{engine.url}/weight_info")
    assert (await post(engine.url + GENERATE, {})).status == 400
    assert (engine.asked["/weight_info"], engine.asked[GENERATE], engine.request_count) == (2, 1, 0)


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
