"""Real vLLM as an observed engine: one server on a tiny model for all families of chat templates.

- A proxy between the gateway and vLLM adds to chat requests what no client may send: the family's chat template, and
  the tokens that are to be sampled. vLLM has an extension for the latter (rig/vllm_extension).
- What was asked and sampled is read from the log of vLLM's scheduler, not from its answers.
- There is one parser for tool calls, that of Hermes, and one for thinking. So the model writes its calls as Hermes
  does, and ends a reply as its template does.
"""

import json
import re
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from benchmarks.bridge_rig.matrix_tables import TEXT
from benchmarks.bridge_rig.public_templates import BEGIN, END, NotRendered
from benchmarks.bridge_rig.talk import Message, Reply
from benchmarks.bridge_rig.template_writer import TemplateWriter
from benchmarks.bridge_rig.tokenizing import Tokens
from benchmarks.exactness_rig.families import Family, template_of
from benchmarks.exactness_rig.observed_engines import ObservedEngine, Sampling
from benchmarks.exactness_rig.scripted_model import ScriptedModel
from rig import vocabulary
from rig.chatml import render_call
from rig.tiny_model import CONTEXT, make_tiny_model
from rig.vllm_server import MODEL_NAME, start_vllm
from stepwell.doctor.replies import parse_reply
from stepwell.steps.step import IntArray, ids_array

CHAT, RENDER, TOKENIZE = "/v1/chat/completions", "/v1/chat/completions/render", "/tokenize"
CALL_ID = re.compile(r'"id":\s*"((?:chatcmpl-tool-|call_)[^"]+)"')
EXTENSION = "stepwell_observed_sampling"
FLAGS = (
    *("--trust-request-chat-template", "--max-model-len", str(CONTEXT), "--reasoning-parser", "qwen3"),
    *("--worker-extension-cls", f"{EXTENSION}.ObservedSampling"),
    *("--logits-processors", f"{EXTENSION}:ScriptedSampling"),
)


@dataclass(frozen=True)
class SharedVllm:
    url: str
    log: Path
    """Where its scheduler writes."""
    ids: dict[str, int]
    """Of all tokens that are more than a byte."""


class TinyTokens(Tokens):
    """The tiny model's, with the control tokens of one chat template."""

    def __init__(self, controls: Sequence[str], ids: dict[str, int]) -> None:
        super().__init__(TEXT, controls)
        self._all = ids
        self._pieces = re.compile("(" + "|".join(map(re.escape, sorted(ids, key=len, reverse=True))) + ")")

    def encode(self, text: str) -> IntArray:
        found = [
            [self._all[piece]] if piece in self._all else vocabulary.encode(piece) for piece in self._pieces.split(text)
        ]
        return ids_array([token for ids in found for token in ids])


@dataclass
class ScriptingProxy:
    """Passes everything on to vLLM, and adds to chat requests the template and the script."""

    vllm: str
    http: aiohttp.ClientSession
    added: dict[str, Any]
    script: list[int] = field(default_factory=list)
    sent: list[Message] = field(default_factory=list)
    """The messages of the last call."""
    answer: tuple[bool, str] = (False, "")
    """Of the last call: is it streamed, and its text."""

    async def pass_on(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        with suppress(ConnectionResetError):  # on a slow machine, a gateway gives a question up
            response = await self._pass_on(request)
        return response

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        raw, is_call, is_stream = await request.read(), False, False
        if request.path in (CHAT, RENDER, TOKENIZE) and b'"messages"' in raw:
            body = orjson.loads(raw)
            is_call, is_stream = request.path == CHAT, bool(body.get("stream"))
            self.sent = body["messages"] if is_call else self.sent
            raw = orjson.dumps(body | self.added | (self.scripted(body) if is_call else {}))
        headers, text = {"Content-Type": "application/json"}, b""
        url = f"{self.vllm}{request.path_qs}"
        async with self.http.request(request.method, url, data=raw or None, headers=headers) as answer:
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            await response.prepare(request)
            async for part in answer.content.iter_any():
                text += part
                if is_call:
                    self.answer = is_stream, text.decode(errors="replace")
                await response.write(part)
        await response.write_eof()
        return response

    def scripted(self, body: dict[str, Any]) -> dict[str, Any]:
        """What the request says besides."""
        return {"vllm_xargs": {"script": self.script}, "stop_token_ids": self.script[-1:]}


@dataclass
class ObservedVllm:
    url: str
    vllm: SharedVllm
    proxy: ScriptingProxy
    model: ScriptedModel
    _read: int = 0

    def say_next(self, history: Sequence[Message], tools: Sequence[Any], reply: Reply) -> None:
        self.sampled()
        stop = self.model.tokens.controls_in(self.model.write(history, tools, reply))[-1]
        thought, content = reply.message.get("reasoning"), reply.message.get("content")
        functions = [call["function"] for call in reply.message.get("tool_calls") or []]
        text = f"<think>\n{thought}\n</think>\n\n" if thought else ""
        text += content or "\n".join(render_call(one["name"], one["arguments"]) for one in functions)
        ends = END if stop in text else stop  # GLM's last token of a call ends every call, and not the reply
        self.proxy.script = self.model.tokens.encode(text + ends).tolist()

    def served(self) -> Message:
        streamed, text = self.proxy.answer
        (reply,) = parse_reply(text, streamed=streamed)
        calls = [
            {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call_id, call in zip(dict.fromkeys(CALL_ID.findall(text)), reply.tools, strict=True)
        ]
        message: Message = {"role": "assistant", "content": reply.text or None}
        return message | ({"reasoning": reply.reasoning} if reply.reasoning else {}) | {"tool_calls": calls or None}

    def sampled(self) -> list[Sampling]:
        noted = self.vllm.log.read_text().splitlines() if self.vllm.log.exists() else []
        found, self._read = noted[self._read :], len(noted)
        return [Sampling(**json.loads(line)) for line in found]

    async def render(self, messages: Sequence[Message], tools: Sequence[Any]) -> list[int]:
        renamed = with_ids_of(self.proxy.sent, messages)
        asked = {"model": MODEL_NAME, "messages": renamed, "max_tokens": 1, **self.proxy.added}
        body = asked | ({"tools": tools} if tools else {})
        async with self.proxy.http.post(f"{self.vllm.url}{RENDER}", json=body) as answer:
            rendered = await answer.json()
        if answer.status != 200:
            raise NotRendered(str(rendered))
        return list(rendered["token_ids"])


def with_ids_of(sent: Sequence[Message], messages: Sequence[Message]) -> list[Message]:
    """The messages with the ids of tool calls that were sent: dialects rename them, and some templates print them."""
    made = iter([call["id"] for message in sent for call in message.get("tool_calls") or []])
    answered = iter([message["tool_call_id"] for message in sent if message["role"] == "tool"])
    renamed: list[Message] = []
    for message in messages:
        calls = [{**call, "id": next(made, call["id"])} for call in message.get("tool_calls") or []]
        answers = {"tool_call_id": next(answered)} if message["role"] == "tool" else {}
        renamed.append({**message, **({"tool_calls": calls} if calls else {}), **answers})
    return renamed


@contextmanager
def shared_vllm(families: Sequence[Family]) -> Iterator[SharedVllm]:
    known = vocabulary.ADDED_IDS
    wanted = {control for family in families for control in template_of(family).controls} | {BEGIN, END}
    controls = sorted(wanted - known.keys())
    ids = known | {control: vocabulary.VOCABULARY_SIZE + place for place, control in enumerate(controls)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_tiny_model(folder / "model", control_tokens=controls, bos_token=BEGIN, eos_token=END)
        noted = folder / "sampling.jsonl"
        with start_vllm(
            model,
            log=folder / "vllm.log",
            flags=FLAGS,
            environment={"STEPWELL_SAMPLING_LOG": str(noted)},
        ) as server:
            yield SharedVllm(server.url, noted, ids)


@asynccontextmanager
async def observed_vllm(vllm: SharedVllm, family: Family) -> AsyncIterator[ObservedEngine]:
    template = template_of(family)
    model = ScriptedModel(TemplateWriter(template, TinyTokens(list(template.controls), vllm.ids)))
    added = {"chat_template": template.source, "chat_template_kwargs": {"enable_thinking": family.thinks}}
    async with aiohttp.ClientSession() as http:
        proxy = ScriptingProxy(vllm.url, http, added)
        async with serve_proxy(proxy) as url:
            yield ObservedVllm(url, vllm, proxy, model)


@asynccontextmanager
async def serve_proxy(proxy: ScriptingProxy) -> AsyncIterator[str]:
    app = web.Application(client_max_size=2**26)
    app.router.add_route("*", "/{path:.*}", proxy.pass_on)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
