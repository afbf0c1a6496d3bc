"""vLLM: its routes, and where its replies carry ids and log-probabilities. vllm_control.py gives it weights.

Routes that exist only with an option: /pause, /is_paused, /weight_info and the weight routes with
VLLM_SERVER_DEV_MODE=1; those of adapters with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1;
/inference/v1/generate, render and derender with --enable-scale-out. While vLLM loads weights it answers /health, but
neither /is_paused nor /weight_info.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from http import HTTPStatus
from itertools import product
from typing import Any

import numpy as np
import orjson

from stepwell.engines.capabilities import PROBE_USER, probe_logprobs_mode
from stepwell.engines.engine import (
    EXTRA_SAMPLING,
    EngineFacts,
    EngineHttp,
    EngineKind,
    EngineRequest,
    Generated,
    StreamedTokens,
    encode_request,
)
from stepwell.engines.openai import MODELS, plain_request
from stepwell.engines.vllm_control import VllmControl
from stepwell.errors import BadRequest, EngineUnavailable
from stepwell.steps.step import IntArray, Json, JsonObject, VersionSpan, ids_array
from stepwell.wire.openai import (
    NO_IDS,
    Sampled,
    Upstream,
    read_choices,
    read_ids,
    read_logprob_list,
    read_model,
    read_object,
    read_sampled,
    read_text,
    read_usage,
    text_ids,
)

log = logging.getLogger("stepwell.gateway")

GENERATE = "/inference/v1/generate"
DERENDER = "/v1/chat/completions/derender"
RENDER, TOKENIZE = "/v1/chat/completions/render", "/tokenize"
TESTED = "0.32"
"""The version that the tests use. Others are a note in the log, never treated otherwise: the probes find what an engine
does."""
RENDERED_FIELDS = (
    *("model", "messages", "tools", "tool_choice", "chat_template_kwargs", "reasoning_effort", "documents"),
    *("add_special_tokens", "add_generation_prompt"),
)
NOT_TOKENIZED = frozenset(("reasoning_effort", "documents", "tool_choice"))
"""The fields of these that TOKENIZE does not know."""
SAMPLE_CHAT: tuple[JsonObject, ...] = (
    {"role": "user", "content": "What is 2 + 2?\n"},
    {"role": "assistant", "content": "It is 4, naïve 你好."},
    {"role": "user", "content": "Thanks!"},
)
SAMPLE_TOOLS: tuple[JsonObject, ...] = (
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
        },
    },
)
ONE_TOKEN: JsonObject = {"max_tokens": 1, "logprobs": True}
NOT_SERVED = (403, 404)
REFUSES_AN_EMPTY_BODY = (400, 422)
"""How an open route answers a request that asks for nothing; a closed one answers 403, a missing one 404."""
BUSY = (429, 502, 503, 504)
"""How an engine answers, or a proxy before it, if the request may be answered later."""
NOT_DERENDERED = frozenset(("stream", "stream_options", "n"))
SCALE_OUT = "start vLLM with --enable-scale-out"
DEV_MODE = "start vLLM with VLLM_SERVER_DEV_MODE=1"


class VllmEngine(EngineKind):
    name = "vllm"
    private_fields = frozenset(
        (
            *("kv_transfer_params", "ec_transfer_params", "vllm_xargs", "chat_template", "cache_salt"),
            *("request_id", "priority", "mm_processor_kwargs", "media_io_kwargs", "prompt_embeds"),
        )
    )
    advice: Mapping[str, str] = {
        "token_ids": "use vLLM 0.11 or newer, and no proxy that drops fields",
        "renderer": f"{SCALE_OUT}, and let no proxy close its routes",
        "template": "use vLLM 0.32 or newer, without a KV connector or a proxy that drops kv_transfer_params",
        "generate": SCALE_OUT,
        "derender": SCALE_OUT,
        "pause": DEV_MODE,
        "weight_versions": DEV_MODE,
        "logprobs_mode": "start vLLM with --logprobs-mode processed_logprobs",
        "tools": "start vLLM with --enable-auto-tool-choice --tool-call-parser PARSER, the parser of your model",
        "resume": "POST /resume, or wait for the sync",
    }

    # -- questions -----------------------------------------------------------------------------------------------------

    async def probe(self, http: EngineHttp) -> EngineFacts | None:
        version = await http.field("/version", "version")
        if not isinstance(version, str):
            return None
        model, window = read_model(await http.require_ok(MODELS))
        if not version.startswith(TESTED):
            log.info("engine %s is vLLM %s; Stepwell's tests use %s", http.address, version, TESTED)
        scale_out = (await http.ask(GENERATE, b"{}"))[0] in REFUSES_AN_EMPTY_BODY
        return EngineFacts(
            kind=self.name,
            server_version=version,
            label=f"vLLM {version}",
            tested="" if version.startswith(TESTED) else TESTED,
            model=model,
            max_model_len=window,
            token_ids=True,
            extra_sampling=frozenset(EXTRA_SAMPLING),
            generate=scale_out,
            derender=scale_out,
            reports_version=True,
            **await self._probe_renderer(http, model),
            weight_versions=isinstance(await http.field("/weight_info", "weight_version"), str),
            pause=isinstance(await http.field("/is_paused", "is_paused"), bool),
        )

    async def _probe_renderer(self, http: EngineHttp, model: str) -> dict[str, Any]:
        for path in (RENDER, TOKENIZE):
            facts = EngineFacts(model=model, renderer=path)
            try:
                ids = await self._render_sample(http, facts)
            except EngineUnavailable:
                continue
            template = blake2b(model.encode() + ids.tobytes(), digest_size=8).hexdigest() if len(ids) else ""
            return {"renderer": path, "renders_chat": path == RENDER, "template": template} if template else {}
        return {}

    async def _render_sample(self, http: EngineHttp, facts: EngineFacts) -> IntArray:
        """The ids of SAMPLE_CHAT; none if the template refuses it. EngineUnavailable if the route is not served."""
        for tools in (None, SAMPLE_TOOLS):  # some templates refuse a conversation without tools
            asked = {"model": facts.model, "messages": SAMPLE_CHAT, "user": PROBE_USER, "tools": tools}
            path, body = self.rendering(asked, facts)
            status, raw = await http.ask(path, body)
            if status in NOT_SERVED:
                raise EngineUnavailable(f"{path} is not served")
            if status == HTTPStatus.OK and len(ids := self.read_rendered(raw)):
                return ids
        return NO_IDS

    async def probe_sampling(self, http: EngineHttp, facts: EngineFacts) -> EngineFacts:
        async def ask(request: JsonObject) -> bytes | None:
            return await _ask_for_token(http, Upstream.COMPLETIONS, orjson.dumps(request))

        facts = replace(facts, logprobs_mode=await probe_logprobs_mode(ask, facts.model))
        facts = await self._probe_chat(http, facts)
        return await self._probe_generate(http, facts) if facts.generate else facts

    async def _probe_chat(self, http: EngineHttp, facts: EngineFacts) -> EngineFacts:
        """Sends the ids of one conversation with the messages of another: an engine that ignores the ids reports the
        prompt of the messages. What is refused is asked for again without tools, then without ids."""
        ids = await self._render_sample(http, facts) if facts.template else NO_IDS
        ids = ids[: (facts.max_model_len or 2 * len(ids)) // 2]  # any ids will do, and they must fit in the window
        asked = {"model": facts.model, "messages": SAMPLE_CHAT[-1:], "user": PROBE_USER, **ONE_TOKEN}
        for sent, tools in product((ids, NO_IDS) if len(ids) else (NO_IDS,), (SAMPLE_TOOLS, ())):
            request = {**asked, "tools": tools} if tools else asked
            exact = self.exact_request(request, sent.tolist(), facts) if len(sent) else None
            path, body = exact or self.request(Upstream.CHAT, request, facts)
            if (raw := await _ask_for_token(http, path, body)) is not None:
                return self._judge_chat(raw, sent, replace(facts, tools=bool(tools)))
        return facts

    def _judge_chat(self, raw: bytes, sent: IntArray, facts: EngineFacts) -> EngineFacts:
        reply = read_object(raw, "answer")
        sampled = read_sampled(reply, read_choices(reply)[0])
        token_ids = len(sampled.prompt_ids) > 0 and _has_tokens(sampled)
        takes_ids = token_ids and len(sent) > 0 and np.array_equal(sampled.prompt_ids, sent)
        return replace(facts, token_ids=token_ids, template=facts.template if takes_ids else "")

    async def _probe_generate(self, http: EngineHttp, facts: EngineFacts) -> EngineFacts:
        asked = {"token_ids": [0], "user": PROBE_USER, "sampling_params": {"max_tokens": 1, "logprobs": 0}}
        raw = await _ask_for_token(http, GENERATE, orjson.dumps(asked))
        is_read = raw is not None and _has_tokens(self.read_generated(raw, [0], facts).sampled)
        return replace(facts, generate=is_read)

    async def check_health(self, http: EngineHttp) -> None:
        await http.require_ok("/health")

    async def is_paused(self, http: EngineHttp) -> bool | None:
        answer = await _field_or_none(http, "/is_paused", "is_paused")
        return answer if isinstance(answer, bool) else None

    async def weight_version(self, http: EngineHttp) -> str | None:
        answer = await _field_or_none(http, "/weight_info", "weight_version")
        return answer if isinstance(answer, str) else None

    async def detokenize(self, http: EngineHttp, model: str, ids: Sequence[int]) -> str | None:
        try:
            status, raw = await http.ask("/detokenize", orjson.dumps({"model": model, "tokens": list(ids)}))
            return read_text(read_object(raw, "text of tokens").get("prompt")) if status == 200 else None
        except EngineUnavailable:
            return None

    # -- calls ---------------------------------------------------------------------------------------------------------

    def request(self, upstream: Upstream, request: Mapping[str, Any], facts: EngineFacts) -> EngineRequest:
        if not facts.token_ids:
            return plain_request(upstream, request, facts)
        return EngineRequest(upstream, encode_request(_with_token_ids(upstream, request), facts))

    def exact_request(self, request: Mapping[str, Any], prompt_ids: Sequence[int], facts: EngineFacts) -> EngineRequest:
        """The field is meant for engines that get a prompt from another one. Templating is skipped, parsing is not."""
        whole = _with_token_ids(Upstream.CHAT, request) | {"kv_transfer_params": {"prompt_token_ids": list(prompt_ids)}}
        return EngineRequest(Upstream.CHAT, encode_request(whole, facts))

    def rendering(self, request: Mapping[str, Any], facts: EngineFacts) -> EngineRequest:
        asked = {name: request[name] for name in (*RENDERED_FIELDS, "user") if request.get(name) is not None}
        if facts.renderer == TOKENIZE and (unknown := NOT_TOKENIZED & asked.keys()):
            raise EngineUnavailable(f"{TOKENIZE} does not know {', '.join(sorted(unknown))}: {SCALE_OUT}")
        return EngineRequest(facts.renderer, encode_request({**asked, "max_tokens": 1}, facts))

    def read_rendered(self, raw: bytes) -> IntArray:
        answer = read_object(raw, "rendered prompt")
        return read_ids(answer.get("token_ids", answer.get("tokens")))

    def read_sampled(self, reply: Mapping[str, Any], choices: Sequence[Mapping[str, Any]]) -> tuple[Sampled, ...]:
        """A chat's reply has the prompt once; completions have it with each choice, for there may be many prompts."""
        first = read_sampled(reply, choices[0])
        if len(choices) == 1:
            return (first,)
        shared = None if "prompt_token_ids" in choices[0] else first.prompt_ids
        return (first, *(read_sampled(reply, choice, shared) for choice in choices[1:]))

    def read_prompt(self, chunk: Mapping[str, Any]) -> IntArray | None:
        return read_ids(chunk["prompt_token_ids"]) if "prompt_token_ids" in chunk else None

    def read_delta(self, piece: Mapping[str, Any], tokens: StreamedTokens) -> None:
        if isinstance(ids := piece.get("token_ids"), list):
            tokens.ids += ids
        if logprobs := piece.get("logprobs"):
            tokens.logprobs += read_logprob_list(logprobs)
        if prompt_ids := piece.get("prompt_token_ids"):
            tokens.prompt_ids = read_ids(prompt_ids)

    def hide_prompt(self, reply: dict[str, Any]) -> None:
        reply.pop("prompt_token_ids", None)
        reply.pop("prompt_text", None)

    def hide_tokens(self, choice: dict[str, Any]) -> None:
        choice.pop("token_ids", None)
        choice.pop("prompt_token_ids", None)

    # -- tokens in, tokens out -----------------------------------------------------------------------------------------

    def generation(self, prompt_ids: Sequence[int], sampling: JsonObject, facts: EngineFacts) -> EngineRequest:
        """Makes the request, by completions if GENERATE is closed."""
        if facts.generate:
            return EngineRequest(
                GENERATE, _encode({"token_ids": prompt_ids, "sampling_params": {**sampling, "logprobs": 0}})
            )
        if not facts.token_ids:
            raise EngineUnavailable(f"vLLM {facts.server_version} gives no token ids: {self.advice['token_ids']}")
        ours = {"model": facts.model, "prompt": prompt_ids, "logprobs": 0, "return_token_ids": True, "stream": False}
        return EngineRequest(Upstream.COMPLETIONS, _encode({**sampling, **ours}))

    def read_generated(self, raw: bytes, prompt_ids: Sequence[int], facts: EngineFacts) -> Generated:
        reply = read_object(raw, "generation")
        choice = read_choices(reply)[0]
        sampled = read_sampled(reply, choice, ids_array(prompt_ids))
        stop_string, model = read_text(choice.get("stop_reason")), sampled.model or facts.model
        sampled = replace(sampled, stop_string=stop_string, model=model)
        return Generated(sampled, read_usage(reply), _spans(choice.get("weight_versions")))

    def derender(self, request: Mapping[str, Any], sampled: Sampled) -> EngineRequest:
        whole = _with_token_ids(Upstream.CHAT, request)
        generated = {"index": 0, "token_ids": text_ids(sampled).tolist(), "finish_reason": sampled.finish_reason}
        body = {
            "model": request.get("model"),
            "generate_response": {"request_id": "continued", "choices": [generated]},
            "prompt_token_ids": sampled.prompt_ids[-64:].tolist(),
            "chat_request": {name: value for name, value in whole.items() if name not in NOT_DERENDERED},
        }
        return EngineRequest(DERENDER, orjson.dumps(body))

    def read_derendered(self, raw: bytes, sampled: Sampled) -> dict[str, Any]:
        """The message without its stop string."""
        message = read_choices(read_object(raw, "derendered answer"))[0].get("message")
        if not isinstance(message, dict):
            raise EngineUnavailable("the engine's derendered answer has no message")
        names = ("content", "reasoning", "reasoning_content")
        texts = [message[name] for name in names if message.get(name) is not None]
        try:
            texts += [call["function"]["arguments"] for call in message.get("tool_calls") or []]
        except (TypeError, KeyError):
            raise EngineUnavailable("the engine's derendered answer has a tool call without arguments") from None
        if not all(isinstance(text, str) for text in texts):
            raise EngineUnavailable("the engine's derendered answer has a part that is not text")
        if sampled.stop_string and sampled.stop_string in (message.get("content") or ""):
            message["content"] = message["content"].rpartition(sampled.stop_string)[0]
        return message

    def token_count(self, request: Mapping[str, Any], facts: EngineFacts) -> EngineRequest:
        return EngineRequest(TOKENIZE, encode_request(request, facts))

    def read_token_count(self, raw: bytes) -> int:
        count = read_object(raw, "count of tokens").get("count")
        if not isinstance(count, int):
            raise EngineUnavailable("the engine's count of tokens is not a number")
        return count

    def control(self, url: str, *, key: str | None = None, timeout: float = 60.0) -> VllmControl:
        return VllmControl(url, key=key, timeout=timeout)


async def _ask_for_token(http: EngineHttp, path: str, body: bytes | None) -> bytes | None:
    """The reply; None if the request was refused. EngineUnavailable if the engine cannot answer now."""
    status, raw = await http.ask(path, body)
    if status in BUSY:
        raise EngineUnavailable(f"{path} answers {status}")
    return raw if status == HTTPStatus.OK else None


def _has_tokens(sampled: Sampled) -> bool:
    """Whether the reply has ids, and a log-probability for each."""
    return sampled.logprobs is not None and len(sampled.logprobs) == len(sampled.response_ids) > 0


async def _field_or_none(http: EngineHttp, path: str, name: str) -> Json:
    try:
        return await http.field(path, name)
    except EngineUnavailable:
        return None


def _with_token_ids(upstream: Upstream, request: Mapping[str, Any]) -> dict[str, Any]:
    whole = {**request, "return_token_ids": True}
    if upstream is Upstream.CHAT:
        whole["include_reasoning"] = True
    return whole


def _encode(body: Mapping[str, object]) -> bytes:
    try:
        return orjson.dumps(body)
    except TypeError as failure:  # for example an integer beyond 64 bits
        raise BadRequest(f"sampling_params cannot be sent to an engine: {failure}") from None


def _spans(value: Any) -> tuple[VersionSpan, ...]:
    try:
        return tuple(VersionSpan(int(span["version"]), span["start"], span["end"]) for span in value or ())
    except (ValueError, TypeError, KeyError):
        return ()
