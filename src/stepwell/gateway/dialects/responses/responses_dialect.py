"""OpenAI's Responses API as a dialect.

- Unknown fields are ignored, and so are tools that run at OpenAI. Clients send new ones with every release, and they do
  not change what this model is asked.
- A field that asks for something which would change the answer, and which the gateway does not have, is refused.
- So is an input item or a part of a content that it cannot translate.
- What a call adds to a conversation is stored with its step, unless the client forbids it or sends earlier answers back
  itself. The answer's `store` says whether it is.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from stepwell.errors import BadRequest, EngineUnavailable, PreviousResponseNotFound
from stepwell.gateway.dialects.chat_form import StepSeal, joined_system
from stepwell.gateway.dialects.dialect import ConversationPart, Dialect, DialectContext, ModelCall, TokenCounter
from stepwell.gateway.dialects.openai import (
    COMMON_FIELDS,
    FLAG,
    OBJECT,
    TEXT,
    choose_model,
    make_call,
    prompt_texts,
    read_json_object,
    repair_messages,
    write_json,
)
from stepwell.gateway.dialects.openai_choices import ChoicesReply
from stepwell.gateway.dialects.responses_events import (
    ResponseContext,
    ResponseEvents,
    ResponseObject,
    item_status,
    response_usage,
    settings_of,
)
from stepwell.gateway.dialects.responses_input import ChatHistory, ClientTools, chosen_tool, read_instructions
from stepwell.gateway.dialects.responses_output import OutputContext, whole_output
from stepwell.gateway.error_responses import ErrorDetails, openai_error
from stepwell.wire.openai import Upstream, read_text

WHOLE_INPUT = "send the whole input instead"
LARGEST_STORED = 256 * 1024
"""Bytes of a request. What a larger one adds is not stored."""
REFUSED: Mapping[str, str] = {
    "conversation": f"this gateway stores no conversations; {WHOLE_INPUT}",
    "prompt": "this gateway stores no prompts; send instructions and input",
    "background": "answers are given in the response to the request; leave it out",
}
"""Fields that are refused unless they are empty or false, and what to do instead."""
SAME_AS_CHAT = (
    *("model", "stream", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "seed", "stop", "logit_bias", "chat_template_kwargs"),
)
"""Fields that are forwarded as they are. Those that only chat has work here too."""
UNLIKE_CHAT = ("n", "max_tokens", "stream_options", "return_token_ids")
ITEMS: dict[str, Any] = {"type": "array", "minItems": 1, "items": OBJECT}
PROMPT_FIELDS: dict[str, Any] = {
    "model": TEXT,
    "input": {"anyOf": [TEXT, ITEMS]},
    "instructions": TEXT,
    "tools": {"type": "array", "items": OBJECT},
    "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required"]}, OBJECT]},
    "reasoning": {"type": "object", "properties": {"effort": TEXT, "summary": TEXT}},
}
RENDERED = ("model", "messages", "tools", "chat_template_kwargs")
"""The fields of a chat request that engines count the tokens of."""
REQUEST_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["model", "input"],
    "properties": {
        **PROMPT_FIELDS,
        "parallel_tool_calls": FLAG,
        "max_output_tokens": {"type": "integer", "minimum": 1},
        "text": {"type": "object", "properties": {"format": OBJECT}},
        "include": {"type": "array", "items": TEXT},
        "metadata": OBJECT,
        "store": FLAG,
        **{name: schema for name, schema in COMMON_FIELDS.items() if name not in UNLIKE_CHAT},
    },
}


class ResponsesTokenCounter:
    path = "responses/input_tokens"
    summary = "Count the tokens of a response's input"
    request_schema: Mapping[str, Any] = {"type": "object", "required": ["model", "input"], "properties": PROMPT_FIELDS}

    def read(self, raw: bytes, around: DialectContext) -> dict[str, Any]:
        request = read_json_object(raw)
        if request.get("previous_response_id"):
            raise BadRequest(f"tokens are counted of a whole input only; {WHOLE_INPUT}")
        tools, history = read_input(request, around)
        messages = joined_system([*read_instructions(request.get("instructions")), *history.messages])
        chat = chat_request(request, messages, tools)
        counted = {name: chat[name] for name in RENDERED if name in chat}
        choose_model(counted, around.models)
        return counted

    def reply(self, tokens: int) -> bytes:
        return orjson.dumps({"object": "response.input_tokens", "input_tokens": tokens})


class ResponsesDialect(Dialect):
    name = "responses"
    paths: tuple[str, ...] = ("responses",)
    summary = "Response"
    description = "OpenAI's call; every response becomes a step. Unknown fields are ignored."
    unrecorded_description = (
        "OpenAI's call, unrecorded. A whole answer's `sampled` has all ids and log-probabilities, its policy_version,\n"
        "version_spans and exactness."
    )
    request_schema: Mapping[str, Any] = REQUEST_SCHEMA
    token_counter: TokenCounter | None = ResponsesTokenCounter()

    def read(self, raw: bytes, around: DialectContext) -> ModelCall:
        request = read_json_object(raw)
        tools, history = read_input(request, around)
        instructions = read_instructions(request.get("instructions"))
        malformed = repair_messages(history.messages)
        part = ConversationPart(
            instructions,
            history.messages,
            _step_before(request, around.seal),
            is_stored=len(raw) <= LARGEST_STORED and wants_storage(request, history.messages),
        )
        messages = joined_system([*instructions, *history.messages])
        call = make_call(
            self,
            Upstream.CHAT,
            chat_request(request, messages, tools),
            around,
            wants_logprobs=False,
            asked_for={"logprobs": True},
            texts=prompt_texts(messages),
            malformed_history=malformed,
            echoed=history.echoed.uids(),
        )
        settings = settings_of(request, call.request, is_stored=part.is_stored)
        output = OutputContext(around.seal.seal(call.uid), tools, bool(settings["reasoning"]["summary"]))
        context = ResponseContext(output, write_json(settings, "the request")[1:])
        return call._replace(context=context, part=part if part.is_stored or part.after else None)

    def reply(self, call: ModelCall, answer: ChoicesReply) -> bytes:
        context, choice = _context(call), answer.message["choices"][0]
        finish = read_text(choice.get("finish_reason"))
        if not isinstance(message := choice.get("message"), dict):
            raise EngineUnavailable("the engine's answer has no message")
        output = whole_output(context.output, message, item_status(finish))
        model = read_text(answer.message.get("model")) or str(call.request.get("model"))
        usage = response_usage(answer.message.get("usage"), answer.usage)
        sampled = _sampled(answer.message, choice) if call.wants.ids else None
        return ResponseObject(context, model).whole(finish, output, usage, sampled)

    def stream(self, call: ModelCall) -> ResponseEvents:
        return ResponseEvents(_context(call), str(call.request.get("model")))

    def error(self, error: ErrorDetails) -> bytes:
        return openai_error(error)


def read_input(request: Mapping[str, Any], around: DialectContext) -> tuple[ClientTools, ChatHistory]:
    for name, why in REFUSED.items():
        if request.get(name):
            raise BadRequest(f"{name} is not supported: {why}")
    tools = ClientTools()
    tools.add(request.get("tools") or [])
    history = ChatHistory(around.seal, tools)
    history.add_input(request.get("input"))
    return tools, history


def wants_storage(request: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> bool:
    """A client that sends earlier answers back does not continue by ids, whatever `store` says."""
    if request.get("store") is False:
        return False
    return bool(request.get("previous_response_id")) or all(message["role"] != "assistant" for message in messages)


def _step_before(request: Mapping[str, Any], seal: StepSeal) -> str:
    """The uid of the step that the request continues by its id; empty if it names none."""
    previous = request.get("previous_response_id")
    if previous is None:
        return ""
    uid = seal.opened(previous) if isinstance(previous, str) else None
    if uid is None:
        raise PreviousResponseNotFound(f"previous_response_id is no id of a response of this gateway; {WHOLE_INPUT}")
    return uid


def chat_request(request: Mapping[str, Any], messages: list[dict[str, Any]], tools: ClientTools) -> dict[str, Any]:
    chat = {name: request[name] for name in SAME_AS_CHAT if request.get(name) is not None}
    chat["messages"] = messages
    if (limit := request.get("max_output_tokens")) is not None:
        if type(limit) is not int or limit < 1:
            raise BadRequest("max_output_tokens must be a whole number of at least 1")
        chat["max_completion_tokens"] = limit
    choice = chosen_tool(request.get("tool_choice"), tools)
    if tools.functions:
        chat["tools"] = tools.functions
        given = {"tool_choice": choice, "parallel_tool_calls": request.get("parallel_tool_calls")}
        chat |= {name: value for name, value in given.items() if value is not None}
    if effort := _object(request, "reasoning").get("effort"):
        chat["reasoning_effort"] = effort
    if (form := _object(_object(request, "text"), "format")).get("type", "text") != "text":
        chat["response_format"] = _response_format(form)
    return chat


def _response_format(form: Mapping[str, Any]) -> dict[str, Any]:
    if form["type"] != "json_schema":
        return {"type": form["type"]}
    fields = ("name", "description", "schema", "strict")
    return {"type": "json_schema", "json_schema": {name: form[name] for name in fields if form.get(name) is not None}}


def _object(holder: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = holder.get(name)
    if value is not None and not isinstance(value, dict):
        raise BadRequest(f"{name} must be an object")
    return value or {}


def _sampled(message: Mapping[str, Any], choice: Mapping[str, Any]) -> dict[str, Any]:
    """The tokens of an unrecorded call."""
    told = {name: value for name, value in choice.items() if name not in ("index", "message")}
    return {"prompt_token_ids": message.get("prompt_token_ids"), **told}


def _context(call: ModelCall) -> ResponseContext:
    assert isinstance(call.context, ResponseContext)
    return call.context
