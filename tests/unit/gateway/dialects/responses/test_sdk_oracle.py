"""2,000 made-up conversations through the dialect, read by the official package: its types, its stream, its items.

After each answer the client sends everything back, and the engine must be asked what a chat client would have asked.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, get_args

import httpx
import openai
import orjson
import pytest
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from stepwell.gateway.dialects.responses_dialect import ResponsesDialect

from stepwell.access.access_keys import AccessKeys
from stepwell.gateway.dialects.chat_form import StepSeal
from stepwell.gateway.dialects.dialect import DialectContext, ModelCall
from stepwell.gateway.dialects.openai_choices import ChoicesStream, read_reply
from tests.unit.gateway.dialects.asking import VLLM
from tests.unit.gateway.dialects.responses.made_up_answers import CUSTOM, Answer, make_answer, make_text, tools_for

CONVERSATIONS, PARTS = 2_000, 4
WITHOUT_CLIENT = 200
"""One conversation of so many goes through the whole client too, which takes ten times as long as all the rest."""
ACCUMULATED = 0.25
"""The share of streams that the package also puts together from their events; it takes as long as all other checks."""
AROUND = DialectContext(response_length=64, seal=StepSeal(AccessKeys(["control-key-of-the-tests"])))
RESPONSES = ResponsesDialect()
EVENTS: dict[str, type[Any]] = {
    name: kind
    for kind in get_args(get_args(ResponseStreamEvent)[0])
    for name in get_args(kind.model_fields["type"].annotation)
}
"""The package's types by the names of their events."""
TEXT_ENDS = {
    "response.output_text": "text",
    "response.reasoning_text": "text",
    "response.reasoning_summary_text": "text",
    "response.function_call_arguments": "arguments",
    "response.custom_tool_call_input": "input",
}
Json = dict[str, Any]


@dataclass
class Client:
    """OpenAI's client, whose server answers what `body` holds."""

    body: bytes = b""
    sent: Json = field(default_factory=dict)

    def __post_init__(self) -> None:
        http: Any = httpx.Client(transport=httpx.MockTransport(self._answer))
        self.openai = openai.OpenAI(base_url="http://gateway/v1", api_key="key", http_client=http, max_retries=0)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.sent = orjson.loads(request.content)
        kind = "text/event-stream" if self.sent.get("stream") else "application/json"
        return httpx.Response(200, headers={"content-type": kind}, content=self.body)


@dataclass
class Conversation:
    """What the client has sent and got so far, and the same as a chat client would have it."""

    luck: Random
    items: list[Any] = field(default_factory=list)
    messages: list[Json] = field(default_factory=list)
    uids: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        self.items.append({"role": "user", "content": text})
        self.messages.append({"role": "user", "content": text})

    def note_answer(self, call: ModelCall, answer: Answer, output: list[Any]) -> None:
        self.uids.append(call.uid)
        self.items += output
        message = {"role": "assistant", **answer.message}
        if thought := message.get("reasoning"):
            message["reasoning_content"] = thought
        message.setdefault("content", None if "tool_calls" in message else "")
        self.messages.append(message)

    def answer_calls(self, answer: Answer, output: list[Any]) -> None:
        calls = [item for item in output if "call" in item["type"]]
        results = [make_text(self.luck) for _ in calls]
        for item, result in zip(calls, results, strict=True):
            kind = "custom_tool_call_output" if item["type"] == "custom_tool_call" else "function_call_output"
            self.items.append({"type": kind, "call_id": item["call_id"], "output": result})
        for call, result in zip(answer.message.get("tool_calls", ()), results, strict=True):
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


def as_codex_keeps(item: Json) -> Json:
    """Without ids, and of the reasoning only what is sealed."""
    return {name: value for name, value in item.items() if name not in ("id", "status") and not _is_thought(item, name)}


def _is_thought(item: Json, name: str) -> bool:
    return item["type"] == "reasoning" and name == "content"


def whole(call: ModelCall, answer: Answer) -> bytes:
    return RESPONSES.reply(call, read_reply(orjson.dumps(answer.whole()), VLLM, keep_ids=False))


def streamed(call: ModelCall, answer: Answer, luck: Random) -> Iterator[bytes]:
    writer, stream = RESPONSES.stream(call), ChoicesStream(VLLM, keep_ids=False)
    for chunk in answer.chunks(luck):
        shown = stream.read(orjson.dumps(chunk))
        assert shown is not None
        yield writer.chunk(shown)
    (sampled,) = stream.sampled()
    assert (sampled.response_ids.tolist(), sampled.prompt_ids.tolist()) == (answer.ids, answer.prompt_ids)
    yield writer.finish(stream.usage)


def without_times(response: Response) -> Json:
    return response.model_dump(exclude={"created_at"}, exclude_none=True, by_alias=True)


def read_events(body: bytes) -> list[Any]:
    """The events by the package's types. Each has the next number, and deltas add up to their end."""
    texts: dict[tuple[str, str], str] = defaultdict(str)
    events = []
    for number, event in enumerate(body.decode().removesuffix("\n\n").split("\n\n")):
        name, data = event.removeprefix("event: ").split("\ndata: ", 1)
        value = orjson.loads(data)
        assert (value["type"], value["sequence_number"]) == (name, number)
        kind, _, what = name.rpartition(".")
        if kind in TEXT_ENDS and what == "delta":
            texts[value["item_id"], kind] += value["delta"]
        elif kind in TEXT_ENDS:
            assert value[TEXT_ENDS[kind]] == texts[value["item_id"], kind]
        events.append(EVENTS[name].model_validate(value))
    return events


def accumulated(events: list[Any]) -> Response:
    """What the package makes of a stream."""
    state: ResponseStreamState[Any] = ResponseStreamState(input_tools=openai.omit, text_format=openai.omit)
    last: Any = [shown for event in events for shown in state.handle_event(event)][-1]
    response = last.response
    assert isinstance(response, Response)
    return response


def ask(conversation: Conversation, answer: Answer, fields: Json, client: Client | None) -> tuple[ModelCall, Response]:
    """One call, answered both ways. Both are the same to the client."""
    asked = {"model": "tiny", "input": conversation.items, "tools": tools_for(answer), **fields}
    call = RESPONSES.read(orjson.dumps(asked), AROUND)
    body = whole(call, answer)
    response = Response.model_validate(orjson.loads(body))
    stream = b"".join(streamed(call, answer, conversation.luck))
    events = read_events(stream)
    assert events[-1].type == f"response.{response.status}"
    assert without_times(events[-1].response) == without_times(response)
    if conversation.luck.random() < ACCUMULATED:
        assert without_times(accumulated(events)) == without_times(response)
    if client is not None:
        check_over_http(client, asked, body, stream, response)
    return call, response


def check_over_http(client: Client, asked: Json, body: bytes, stream: bytes, response: Response) -> None:
    client.body = body
    assert without_times(client.openai.responses.create(**asked)) == without_times(response)
    assert client.sent == asked, "the package sends what it is given"
    client.body = stream
    with client.openai.responses.stream(**asked) as events:
        last: Any = list(events)[-1]
    assert last.type == f"response.{response.status}"
    assert without_times(last.response) == without_times(response)


def as_compared(messages: list[Json]) -> list[Json]:
    """With arguments as values; those of a custom tool that are no JSON are not compared."""
    compared = json.loads(json.dumps(messages))
    for message in compared:
        for call in message.get("tool_calls") or ():
            function = call["function"]
            function["arguments"] = _as_value(function["arguments"], function["name"] in CUSTOM)
    return list(compared)


def _as_value(arguments: str, is_custom: bool) -> Any:
    try:
        value = json.loads(arguments)
    except ValueError:
        return {} if is_custom else {"malformed": arguments} if arguments else ""
    return value


@pytest.mark.parametrize("part", range(PARTS))
def test_the_package_reads_every_answer_and_the_engine_sees_one_conversation(part: int) -> None:
    client = Client()
    for seed in range(part, CONVERSATIONS, PARTS):
        converse(Random(seed), None if seed % WITHOUT_CLIENT else client)


def converse(luck: Random, client: Client | None) -> None:
    conversation, is_codex = Conversation(luck), luck.random() < 0.5
    fields = {"instructions": "Be brief.", "reasoning": {"effort": "low", "summary": "auto"}} if is_codex else {}
    for _ in range(luck.choice([1, 1, 1, 1, 2, 3])):
        conversation.say(make_text(luck, 1))
        answer = make_answer(luck)
        call, response = ask(conversation, answer, fields, client)
        check_request(conversation, call, has_system=is_codex, all_echoed=not is_codex)
        check_response(call, answer, response)
        output = [item.model_dump(exclude_none=True, by_alias=True, mode="json") for item in response.output]
        if is_codex:
            output = list(map(as_codex_keeps, output))
        conversation.note_answer(call, answer, output)
        conversation.answer_calls(answer, output)


def check_request(conversation: Conversation, call: ModelCall, *, has_system: bool, all_echoed: bool) -> None:
    messages = call.request["messages"]
    if has_system:
        assert messages[0] == {"role": "system", "content": "Be brief."}
    expected = as_compared(conversation.messages)
    got = as_compared(messages[has_system:])
    for one, other in zip(got, expected, strict=True):
        assert one == other or _differs_in_custom_only(one, other)
    if all_echoed:
        assert list(call.echoed) == conversation.uids
    else:
        assert [uid for uid in conversation.uids if uid in call.echoed] == list(call.echoed)


def _differs_in_custom_only(one: Json, other: Json) -> bool:
    """A custom tool's input that was cut off is whole JSON when it comes back."""
    for message in (one, other):
        for call in message.get("tool_calls") or ():
            if call["function"]["name"] in CUSTOM:
                call["function"]["arguments"] = {}
    return one == other


def check_response(call: ModelCall, answer: Answer, response: Response) -> None:
    assert AROUND.seal.opened(response.id) == call.uid
    assert response.output_text == answer.message.get("content", "")
    calls = [item for item in response.output if "call" in item.type]
    assert len(calls) == len(answer.message.get("tool_calls", ()))
    assert response.usage is not None
    assert response.usage.output_tokens == len(answer.ids)
    assert response.usage.output_tokens_details.reasoning_tokens == 2
    assert response.status == ("incomplete" if answer.finish_reason == "length" else "completed")
