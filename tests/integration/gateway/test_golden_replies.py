"""What agents and engines see of each call, byte for byte as in the files of golden/, and what is recorded of it.

A file that is missing is written, and its test fails. Ids, times and ports are replaced by fixed words.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rig.fake_engine import FakeEngine, Faults, Reply, ToolCall
from rig.gateways import PATIENT, serve_gateway
from rig.local_pool import LocalPool
from stepwell.pool.api.producing import SubmitVerdict
from stepwell.steps.step import Step

GOLDEN = Path(__file__).with_name("golden")
HIDDEN_HEADERS = ("Date", "Server")
TRAJECTORY = "/t/p/v1"
HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
ADDED = Reply("sum", (ToolCall("add", {"a": 1, "b": 2}), ToolCall("add", {"a": 3, "b": 4})))
EVERYTHING = {"return_token_ids": True, "stream_options": {"include_usage": True}}
REPLACED = (
    (re.compile(r"(chatcmpl-tool|chatcmpl|cmpl)-[0-9a-f]{16}"), r"\1-ID"),
    (re.compile(r'"request_id": ?"[0-9a-f]+"'), '"request_id":"ID"'),
    (re.compile(r'"id":"[0-9a-f]{32}"'), '"id":"ID"'),
    (re.compile(r'"created":\d+'), '"created":0'),
    (re.compile(r"127\.0\.0\.1:\d+"), "ENGINE"),
)
COMMENT = ": keep-alive\n\n"
SILENCE = 60.0
"""Seconds: the engine is silent until the agent has heard of it."""


@dataclass(frozen=True)
class Case:
    name: str
    call: str
    body: Any
    faults: Faults = field(default_factory=Faults)
    replies: tuple[Reply, ...] = ()
    headers: dict[str, str] = field(default_factory=dict)
    base: str = TRAJECTORY
    engine: dict[str, Any] = field(default_factory=dict)
    keep_alive: float = 15.0


def chat(name: str, **rest: Any) -> Case:
    """A case of chat; what is no part of Case is a field of the request."""
    return _case("chat", name, {"model": "tiny", "messages": HELLO, "max_tokens": 8, "seed": 1}, rest)


def completions(name: str, **rest: Any) -> Case:
    return _case("completions", name, {"model": "tiny", "prompt": "once", "max_tokens": 8, "seed": 1}, rest)


def _case(kind: str, name: str, body: dict[str, Any], rest: dict[str, Any]) -> Case:
    ours = {key: rest.pop(key) for key in list(rest) if key in Case.__dataclass_fields__}
    call = "chat/completions" if kind == "chat" else "completions"
    return Case(f"{kind}_{name}", call, ours.pop("body", {**body, **rest}), **ours)


HALF = {"faults": Faults(abort_at_token=2, times=1), "replies": (Reply("abcd"), Reply("cd"))}
THOUGHT = (Reply("four", reasoning="hm"),)
CASES = (
    chat("whole"),
    chat("whole_everything", logprobs=True, top_logprobs=2, **EVERYTHING),
    chat("whole_two", n=2),
    chat("whole_two_everything", n=2, logprobs=True, return_token_ids=True),
    chat("whole_tools", tools=[TOOL], max_tokens=64, replies=(ADDED,)),
    chat("whole_thinking", replies=THOUGHT, max_tokens=24),
    chat("whole_thinking_hidden", replies=THOUGHT, max_tokens=24, include_reasoning=False),
    chat("whole_broken_off", **HALF),
    chat("whole_broken_off_everything", logprobs=True, return_token_ids=True, **HALF),
    chat("whole_broken_off_constrained", faults=Faults(abort_at_token=2, times=1), bad_words=["x"]),
    chat("whole_malformed_history", messages=[
        *HELLO,
        {
            "role": "assistant",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": "{"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "no"},
    ]),
    chat("whole_side_call", messages=[
        {"role": "system", "content": "You are a title generator. You output ONLY a thread title."},
        *HELLO,
    ]),
    chat("whole_marked_side", headers={"x-stepwell-call": "side"}),
    chat("whole_greedy", temperature=0, stop=["x"], seed=None),
    chat("whole_stripped", cache_salt="s", vllm_xargs={"a": 1}, unknown={"b": 2}, max_completion_tokens=5),
    chat("whole_plain_engine", engine={"plain": True}),
    chat("whole_refused", model="other"),
    chat("whole_too_long", messages=[{"role": "user", "content": "x" * 100}], engine={"max_model_len": 64}),
    chat("whole_engine_error", faults=Faults(error_status=500)),
    chat("whole_no_engine", faults=Faults(error_status=503)),
    chat("whole_hang_up", faults=Faults(disconnect_at_token=2)),
    chat("whole_no_json", faults=Faults(malformed="not_json")),
    chat("whole_bad_marked", headers={"x-stepwell-call": "other"}),
    chat("whole_bad_body", body=[1]),
    chat("whole_bad_messages", messages=[]),
    chat("whole_bad_sampling", temperature="hot"),
    chat("whole_unknown_trajectory", base="/nobody/p/v1"),
    chat("stream", stream=True),
    chat("stream_usage", stream=True, stream_options={"include_usage": True}),
    chat("stream_everything", stream=True, logprobs=True, top_logprobs=2, **EVERYTHING),
    chat("stream_two", stream=True, n=2),
    chat("stream_two_everything", stream=True, n=2, logprobs=True, **EVERYTHING),
    chat("stream_tools", stream=True, tools=[TOOL], max_tokens=64, replies=(ADDED,)),
    chat("stream_thinking", stream=True, replies=THOUGHT, max_tokens=24),
    chat("stream_thinking_hidden", stream=True, replies=THOUGHT, max_tokens=24, include_reasoning=False),
    chat("stream_broken_off", stream=True, **HALF),
    chat("stream_broken_off_everything", stream=True, logprobs=True, **EVERYTHING, **HALF),
    chat("stream_broken_off_tools", stream=True, tools=[TOOL], max_tokens=64, replies=(
        ADDED, Reply("m", ADDED.tool_calls),
    ), faults=Faults(abort_at_token=2, times=1)),
    chat("stream_broken_off_always", stream=True, faults=Faults(abort_at_token=1)),
    chat("stream_keep_alive", stream=True, faults=Faults(silent_s=SILENCE, silent_at_token=3), keep_alive=1.5),
    chat("stream_awkward", stream=True, replies=(Reply("naïve ☕"),), faults=Faults(awkward_splits=True)),
    chat("stream_no_done", stream=True, faults=Faults(no_done=True)),
    chat("stream_engine_error", stream=True, faults=Faults(error_at_token=3)),
    chat("stream_cut", stream=True, faults=Faults(disconnect_at_token=3)),
    chat("stream_no_choices", stream=True, faults=Faults(malformed="no_choices")),
    chat("stream_refused", stream=True, model="other"),
    chat("stream_refused_late", stream=True, faults=Faults(delay_s=SILENCE, error_status=400), keep_alive=1.5),
    chat("stream_bad_options", stream=True, stream_options=1),
    chat("stream_plain_engine", stream=True, engine={"plain": True}),
    chat("root", base="/unrecorded/v1"),
    chat("root_two", base="/unrecorded/v1", n=2),
    chat("root_broken_off", base="/unrecorded/v1", **HALF),
    chat("root_stream", base="/unrecorded/v1", stream=True),
    chat("root_refused", base="/unrecorded/v1", model="other"),
    completions("whole"),
    completions("whole_everything", logprobs=2, **EVERYTHING),
    completions("whole_ids", prompt=[1, 2, 3], logprobs=0),
    completions("whole_two", n=2),
    completions("whole_two_prompts", prompt=["once", "twice"], return_token_ids=True),
    completions("whole_broken_off", faults=Faults(abort_at_token=2, times=1)),
    completions("whole_plain_engine", engine={"plain": True}),
    completions("whole_refused", model="other"),
    completions("whole_bad_prompt", prompt=""),
    completions("whole_bad_echo", echo=True),
    completions("stream", stream=True),
    completions("stream_everything", stream=True, logprobs=2, **EVERYTHING),
    completions("stream_two", stream=True, n=2),
    completions("stream_broken_off", stream=True, faults=Faults(abort_at_token=2, times=1)),
    completions("stream_engine_error", stream=True, faults=Faults(error_at_token=3)),
    completions("root", base="/unrecorded/v1"),
    completions("root_two_prompts", base="/unrecorded/v1", prompt=["once", "twice"], n=2),
)  # fmt: skip


class Tokenizer:
    """Letters as their code points."""

    eos_token_id = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [*([1] if add_special_tokens else []), *map(ord, text)]

    def apply_chat_template(self, messages: list[dict[str, str]], **_: object) -> str:
        return "".join(f"<{message['role']}>{message['content']}" for message in messages)


class NotingPool(LocalPool):
    """A pool that keeps what it is handed."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[Step] = []

    async def submit_steps(self, steps: Sequence[Step], **options: Any) -> list[SubmitVerdict]:
        self.noted += steps
        return await super().submit_steps(steps, **options)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_a_call_is_answered_forwarded_and_recorded_as_ever(case: Case) -> None:
    compare(case.name, await transcript(case))


async def test_the_openapi_document_is_as_ever(pool: LocalPool) -> None:
    async with (
        FakeEngine() as engine,
        serve_gateway(pool, [engine.url]) as url,
        aiohttp.ClientSession(url) as http,
        http.get("/openapi.json") as answer,
    ):
        document = without_descriptions(await answer.json())
        compare("openapi", json.dumps(document, indent=1, ensure_ascii=False, sort_keys=True) + "\n")


def without_descriptions(part: Any) -> Any:
    if isinstance(part, list):
        return [without_descriptions(value) for value in part]
    if not isinstance(part, dict):
        return part
    return {name: without_descriptions(value) for name, value in part.items() if name != "description"}


def compare(name: str, text: str) -> None:
    path = GOLDEN / f"{name}.txt"
    if not path.exists():
        path.write_text(text)
        pytest.fail(f"{path.name} is written; see whether it is right")
    assert text == path.read_text()


async def transcript(case: Case) -> str:
    pool, limits = NotingPool(), replace(PATIENT, keep_alive_seconds=case.keep_alive)
    async with (
        FakeEngine(replies=case.replies, **case.engine) as engine,
        serve_gateway(pool, [engine.url], load_tokenizer=lambda _: Tokenizer(), limits=limits) as url,
        aiohttp.ClientSession(url) as http,
    ):
        engine.faults = case.faults
        assert (await http.post("/init_trajectory", json={"trajectory_uid": "t", "prompt_uid": "p"})).status == 200
        async with http.post(f"{case.base}/{case.call}", json=case.body, headers=case.headers) as answer:
            shown = [f"{name}: {value}" for name, value in answer.headers.items() if name not in HIDDEN_HEADERS]
            told = "\n".join([str(answer.status), *shown, "", await body_of(answer, engine)])
        assert (await http.post("/t/p/complete_trajectory", json={})).status == 200
        asked = [f"{seen.method} {seen.path}\n{json.dumps(seen.body, sort_keys=True)}" for seen in engine.requests]
    text = "\n".join([told, "---- the engine was asked", *asked, "---- recorded", *map(recorded, pool.noted), ""])
    for pattern, word in REPLACED:
        text = pattern.sub(word, text)
    return text


async def body_of(answer: aiohttp.ClientResponse, engine: FakeEngine) -> str:
    """Without the comments after the first, whose number is a matter of time."""
    body = b""
    async for piece in answer.content.iter_any():
        body += piece
        if COMMENT.encode() in body:
            engine.speaks.set()
    before, comment, after = body.decode().partition(COMMENT)
    return before + comment + after.replace(COMMENT, "")


def recorded(step: Step) -> str:
    logprobs = None if step.response_logprobs is None else [round(float(one), 4) for one in step.response_logprobs]
    return json.dumps({
        "prompt_ids": step.prompt_ids.tolist(),
        "response_ids": step.response_ids.tolist(),
        "logprobs": logprobs,
        "finish_reason": step.finish_reason,
        "exactness": step.exactness,
        "quarantine": step.quarantine,
        "untrainable": step.untrainable,
        "sampling": step.sampling,
        "extras": step.extras,
        "version_spans": step.version_spans,
    })  # fmt: skip
