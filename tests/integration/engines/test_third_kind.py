"""A third kind of engine is one class and one row: the gateway probes, asks, reads and records it by that alone."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from rig.fake_engine import FakeEngine
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from stepwell.engines import ENGINES
from stepwell.engines.engine import (
    EngineFacts,
    EngineHttp,
    EngineRequest,
    Generated,
    StreamedTokens,
    encode_request,
)
from stepwell.engines.openai import OpenAIEngine
from stepwell.steps.step import Exactness, IntArray, JsonObject, ids_array
from stepwell.wire.openai import (
    NO_USAGE,
    Sampled,
    Upstream,
    read_choices,
    read_ids,
    read_logprob_list,
    read_object,
    read_sampled,
)
from tests.integration.engines.engine_calls import ASKED, CHAT, watched

PROMPT, ANSWER = [1, 2, 3], [7, 8]
LOGPROBS = {"content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1.0}]}
META = {"input_ids": PROMPT, "output_ids": ANSWER}


class EchoEngine(OpenAIEngine):
    """Has its ids in `meta`, if `with_meta` asks for them, and a generate route of its own."""

    name = "echo"

    async def probe(self, http: EngineHttp) -> EngineFacts | None:
        model = await http.field("/echo/info", "model")
        if not isinstance(model, str):
            return None
        return EngineFacts(
            kind=self.name, label="Echo", model=model, token_ids=True, generate=True, weight_versions=True
        )

    async def check_health(self, http: EngineHttp) -> None:
        await http.require_ok("/echo/info")

    async def weight_version(self, http: EngineHttp) -> str | None:
        return str(await http.field("/echo/info", "weights"))

    def request(self, upstream: Upstream, request: Mapping[str, Any], facts: EngineFacts) -> EngineRequest:
        return EngineRequest(upstream, encode_request({**request, "with_meta": True}, facts))

    def read_sampled(self, reply: Mapping[str, Any], choices: Sequence[Mapping[str, Any]]) -> tuple[Sampled, ...]:
        prompt = read_ids(reply["meta"]["input_ids"])
        return tuple(
            read_sampled(reply, {**choice, "token_ids": choice["meta"]["output_ids"]}, prompt) for choice in choices
        )

    def read_prompt(self, chunk: Mapping[str, Any]) -> IntArray | None:
        return read_ids(chunk["meta"]["input_ids"]) if "meta" in chunk else None

    def read_delta(self, piece: Mapping[str, Any], tokens: StreamedTokens) -> None:
        tokens.ids += piece.get("meta", {}).get("output_ids", [])
        tokens.logprobs += read_logprob_list(piece.get("logprobs"))

    def hide_prompt(self, reply: dict[str, Any]) -> None:
        reply.pop("meta", None)

    def hide_tokens(self, choice: dict[str, Any]) -> None:
        choice.pop("meta", None)

    def generation(self, prompt_ids: Sequence[int], sampling: JsonObject, facts: EngineFacts) -> EngineRequest:
        return EngineRequest("/echo/generate", orjson.dumps({"input_ids": prompt_ids}))

    def read_generated(self, raw: bytes, prompt_ids: Sequence[int], facts: EngineFacts) -> Generated:
        reply = read_object(raw, "generation")
        choice = read_choices(reply)[0]
        ids = {**choice, "token_ids": choice["meta"]["output_ids"]}
        return Generated(read_sampled(reply, ids, ids_array(prompt_ids)), NO_USAGE, ())


KINDS = (EchoEngine(), *ENGINES)


class EchoServer:
    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[Any] = []

    async def info(self, _: web.Request) -> web.Response:
        return web.json_response({"model": "echo-1", "weights": "4"})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(body := await request.json())
        choice = {"index": 0, "logprobs": LOGPROBS, "finish_reason": "stop", "meta": META}
        if not body.get("stream"):
            message = {"role": "assistant", "content": "ab"}
            reply = {"model": "echo-1", "meta": META, "choices": [{**choice, "message": message}]}
            return web.json_response(reply)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        chunk = {"model": "echo-1", "meta": META, "choices": [{**choice, "delta": {"content": "ab"}}]}
        await response.write(b"data: " + orjson.dumps(chunk) + b"\n\ndata: [DONE]\n\n")
        return response

    async def generate(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        return web.json_response({"choices": [{"logprobs": LOGPROBS, "finish_reason": "stop", "meta": META}]})


@asynccontextmanager
async def echo_server() -> AsyncIterator[EchoServer]:
    server, app = EchoServer(), web.Application()
    app.router.add_get("/echo/info", server.info)
    app.router.add_post(CHAT.value, server.chat)
    app.router.add_post("/echo/generate", server.generate)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()


async def test_each_engine_of_a_mixed_fleet_is_probed_and_asked_as_its_kind_needs_it(engine: FakeEngine) -> None:
    async with echo_server() as echo, FakeEngine(plain=True) as plain, watched(engine, plain, kinds=KINDS) as engines:
        await engines.add(echo.url)
        assert [view.facts.kind for view in engines.replicas] == ["vllm", "openai", "echo"]
        for _ in range(3):
            reply = await engines.send(CHAT, ASKED)
            assert reply.status == 200
            await reply.read()
        asked = [engine.requests[-1].body, plain.requests[-1].body, echo.bodies[-1]]
    wanted = ("return_token_ids", "with_meta")
    assert [[name for name in wanted if name in body] for body in asked] == [["return_token_ids"], [], ["with_meta"]]


async def test_calls_of_a_third_kind_are_recorded_with_its_ids(pool: LocalPool) -> None:
    async with (
        echo_server() as echo,
        serve_gateway(pool, [echo.url], kinds=KINDS) as url,
        aiohttp.ClientSession(url) as http,
    ):
        assert (await http.post("/init_trajectory", json={"trajectory_uid": "t", "prompt_uid": "p"})).status == 200
        for stream in (False, True):
            async with http.post(
                "/t/p/v1/chat/completions", json={**ASKED, "model": "echo-1", "stream": stream}
            ) as reply:
                text = await reply.text()
            assert reply.status == 200, text
            assert '"content":"ab"' in text
            assert "meta" not in text, "the agent did not ask for ids"
        assert (await http.post("/t/p/complete_trajectory", json={})).status == 200
        async with http.post("/generate", json={"prompt_ids": [5], "sampling_params": {}}) as reply:
            generated = await reply.json()
    steps = pool.taken()
    assert [step.response_ids.tolist() for step in steps] == [ANSWER, ANSWER]
    assert [step.prompt_ids.tolist() for step in steps] == [PROMPT, PROMPT]
    assert {(step.exactness, step.quarantine, step.policy_version) for step in steps} == {(Exactness.ENGINE, None, 4)}
    assert (generated["token_ids"], generated["log_probs"]) == (ANSWER, [-0.5, -1.0])
    assert echo.bodies[-1] == {"input_ids": [5]}
