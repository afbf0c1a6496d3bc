"""Anthropic's own package as the judge: it sends the requests and parses every answer, streamed and whole."""

import json
import random
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2
from anthropic._streaming import SSEDecoder
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter
from stepwell.gateway.dialects.messages_dialect import MessagesDialect

from stepwell.access.access_keys import AccessKeys
from stepwell.gateway.dialects.chat_form import StepSeal
from stepwell.gateway.dialects.dialect import DialectContext, ModelCall
from stepwell.gateway.dialects.openai_choices import read_reply
from tests.unit.gateway.dialects.asking import VLLM, PassedStream
from tests.unit.gateway.dialects.scripted_chats import NAMES, ScriptedAnswer, random_answer, random_text

SEAL = StepSeal(AccessKeys(["control-key-of-the-tests"]))
AROUND = DialectContext(response_length=64, seal=SEAL)
TOOLS: Any = [{"name": name, "description": "", "input_schema": {"type": "object"}} for name in NAMES]
CONVERSATIONS = 2000
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


class ScriptedServer:
    """Answers by the dialect, with what an engine says by script."""

    def __init__(self, rng: random.Random) -> None:
        self.answer = ScriptedAnswer()
        """The next."""
        self.calls: list[ModelCall] = []
        self._rng = rng

    def whole(self, raw: bytes) -> bytes:
        call = self._read(raw)
        return call.dialect.reply(call, read_reply(self.answer.whole(), VLLM, keep_ids=call.wants.ids))

    def stream(self, raw: bytes) -> Iterator[bytes]:
        passed = PassedStream(self._read(raw))
        for event in self.answer.events(self._rng):
            yield checked(passed.feed(event))
        yield checked(passed.finish())

    def _read(self, raw: bytes) -> ModelCall:
        self.calls.append(call := MessagesDialect().read(raw, AROUND))
        return call


class AnthropicClient:
    """The whole package: its client sends the requests."""

    def __init__(self, server: ScriptedServer) -> None:
        self._server = server
        http = httpx2.Client(transport=httpx2.MockTransport(self._respond))
        self._sdk = anthropic.Anthropic(base_url="http://gateway/t/p", api_key="key", http_client=http, max_retries=0)

    def ask(self, asked: Any) -> tuple[Message, Message]:
        """The same question twice: answered whole, and streamed."""
        whole = self._sdk.messages.create(**asked)
        with self._sdk.messages.stream(**asked) as stream:
            return whole, stream.get_final_message()

    def _respond(self, request: httpx2.Request) -> httpx2.Response:
        assert request.url.path == "/t/p/v1/messages"
        raw = request.read()
        if json.loads(raw).get("stream"):
            headers = {"content-type": "text/event-stream; charset=utf-8"}
            return httpx2.Response(200, content=self._server.stream(raw), headers=headers)
        return httpx2.Response(200, content=self._server.whole(raw), headers={"content-type": "application/json"})


class AnthropicParser:
    """The package's types and its parser of streams, without its client, which takes most of the time."""

    def __init__(self, server: ScriptedServer) -> None:
        self._server = server

    def ask(self, asked: Any) -> tuple[Message, Message]:
        raw, streamed = json.dumps(asked, default=lambda block: block.to_dict()).encode(), None
        whole = Message.model_validate_json(self._server.whole(raw))
        buffers: dict[int, bytes] = {}
        for event in SSEDecoder().iter_bytes(self._server.stream(raw)):
            parsed = EVENT.validate_python(event.json())
            streamed = accumulate_event(event=parsed, current_snapshot=streamed, json_bufs=buffers)
        assert streamed is not None
        return whole, streamed


def checked(events: bytes) -> bytes:
    """Each event has one line of data, and is named after its type."""
    for event in events.split(b"\n\n")[:-1]:
        name, data = event.split(b"\n")
        assert data.startswith(b'data: {"type":"%s"' % name.removeprefix(b"event: "))
    return events


def converse(client: AnthropicClient | AnthropicParser, server: ScriptedServer, rng: random.Random) -> None:
    """Up to two turns; each is asked for whole, and again as a stream."""
    user = random_text(rng) or "hello"
    history: list[Any] = [{"role": "user", "content": user}]
    told: list[Any] = [{"role": "user", "content": user}]
    uids: list[str] = []
    options: dict[str, Any] = {"tools": TOOLS, "stop_sequences": ["STOP"]} if rng.random() < 0.7 else {}
    for _ in range(rng.choice((1, 1, 2))):
        server.answer = random_answer(rng, tools="tools" in options)
        asked: Any = {"model": "m", "max_tokens": 64, "messages": history, **options}
        whole, streamed = client.ask(asked)
        first, second = server.calls
        server.calls.clear()
        for call in (first, second):
            assert (as_read(call.request["messages"]), call.echoed) == (told, tuple(uids))
        check_message(Message.model_validate(whole.to_dict()), server.answer)
        assert unsealed(streamed, second) == unsealed(whole, first)
        uids += [second.uid] if any(block.type != "text" for block in streamed.content) else []
        history.append({"role": "assistant", "content": streamed.content})
        told.append(as_read([server.answer.message()])[0])
        blocks, messages = user_turn(streamed, server.answer, rng)
        history.append({"role": "user", "content": blocks})
        told += messages


def user_turn(
    message: Message, answer: ScriptedAnswer, rng: random.Random
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Results of the tools that the message calls, and a text: as blocks, and as an engine should be told."""
    calls = [block.id for block in message.content if block.type == "tool_use"]
    results = [(served, call.call_id, random_text(rng)) for served, call in zip(calls, answer.calls, strict=True)]
    blocks: list[dict[str, Any]] = [
        {"type": "tool_result", "tool_use_id": served, "content": text} for served, _, text in results
    ]
    messages: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": own, "content": text} for _, own, text in results
    ]
    if not calls or rng.random() < 0.3:
        text = random_text(rng)
        blocks.append({"type": "text", "text": text})
        messages.append({"role": "user", "content": text})
    return blocks, messages


def as_read(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as a template sees them: reasoning under one name, arguments parsed."""
    read = []
    for message in messages:
        shown = {name: value for name, value in message.items() if name not in ("tool_calls", "reasoning_content")}
        if calls := message.get("tool_calls"):
            shown["tool_calls"] = [
                (call["id"], call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls
            ]
        read.append(shown)
    return read


def check_message(message: Message, answer: ScriptedAnswer) -> None:
    uid = SEAL.opened(message.id)
    assert uid is not None
    expected: list[Any] = []
    if answer.reasoning:
        expected.append(("thinking", answer.reasoning, SEAL.seal(uid)))
    if answer.text:
        expected.append(("text", answer.text))
    expected += [
        ("tool_use", SEAL.attach(call.call_id, uid), call.name, json.loads(call.arguments)) for call in answer.calls
    ]
    assert [shown(block) for block in message.content] == expected
    stop = answer.stop_reason if isinstance(answer.stop_reason, str) else None
    reason = "tool_use" if answer.calls else "stop_sequence" if stop else "end_turn"
    if answer.finish_reason == "length":
        reason = "max_tokens"
    assert (message.stop_reason, message.stop_sequence) == (reason, stop)
    used = message.usage.input_tokens, message.usage.output_tokens
    assert used == (len(answer.prompt_ids), answer.response_tokens)


def shown(block: Any) -> tuple[Any, ...]:
    match block.type:
        case "thinking":
            return "thinking", block.thinking, block.signature
        case "text":
            return "text", block.text
        case _:
            return block.type, block.id, block.name, block.input


def unsealed(message: Message, call: ModelCall) -> dict[str, Any]:
    """The message without what is its own in every call."""
    return dict(json.loads(json.dumps(message.to_dict(exclude_none=True)).replace(SEAL.seal(call.uid), "SEALED")))


def test_2000_conversations_are_parsed_by_anthropics_package_alike_streamed_and_whole() -> None:
    rng = random.Random(17)
    server = ScriptedServer(rng)
    client, parser = AnthropicClient(server), AnthropicParser(server)
    for number in range(CONVERSATIONS):
        converse(parser if number % 20 else client, server, rng)
