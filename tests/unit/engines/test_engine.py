import json
import tracemalloc
from typing import cast

import pytest

from stepwell.engines import ENGINES, PRIVATE_FIELDS
from stepwell.engines.connections import EngineConnections
from stepwell.engines.engine import EngineFacts, EngineHttp, encode_request, probe_engine
from stepwell.engines.openai import OpenAIEngine
from stepwell.errors import BadRequest, EngineUnavailable
from stepwell.steps.step import Json
from stepwell.wire.openai import Upstream


class ScriptedHttp(EngineHttp):
    """A server that answers these paths with these bodies, and all others with 404."""

    def __init__(self, **bodies: Json) -> None:
        super().__init__(cast("EngineConnections", None), "http://e")
        self.bodies = {f"/{path.replace('__', '/')}": body for path, body in bodies.items()}
        self.asked: list[str] = []

    async def ask(self, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        self.asked.append(path)
        return (200, json.dumps(self.bodies[path]).encode()) if path in self.bodies else (404, b"")


MODELS: Json = {"data": [{"id": "m", "max_model_len": 32}]}


async def test_the_first_kind_that_recognises_a_server_handles_it() -> None:
    vllm, plain = ScriptedHttp(version={"version": "0.32.1"}, v1__models=MODELS), ScriptedHttp(v1__models=MODELS)
    kind, facts = await probe_engine(vllm, ENGINES)
    assert (kind.name, facts.kind, facts.model, facts.max_model_len) == ("vllm", "vllm", "m", 32)
    assert (facts.token_ids, facts.generate, facts.pause, facts.weight_versions) == (True, False, False, False)
    routes = ["/inference/v1/generate", "/v1/chat/completions/render", "/tokenize", "/weight_info", "/is_paused"]
    assert vllm.asked == ["/version", "/v1/models", *routes]
    kind, facts = await probe_engine(plain, ENGINES)
    assert (kind.name, facts.token_ids, plain.asked) == ("openai", False, ["/version", "/v1/models"])


async def test_a_server_that_lists_no_models_is_unavailable() -> None:
    with pytest.raises(EngineUnavailable, match="/v1/models answers 404"):
        await probe_engine(ScriptedHttp(), ENGINES)
    with pytest.raises(EngineUnavailable, match="is none of these: vllm"):
        await probe_engine(ScriptedHttp(), ENGINES[:1])


def test_names_of_kinds_are_unique_and_every_kind_gives_advice() -> None:
    assert len({kind.name for kind in ENGINES}) == len(ENGINES)
    for kind in ENGINES:
        assert {"token_ids", "generate", "derender", "pause", "weight_versions"} <= kind.advice.keys()
        assert kind.private_fields <= PRIVATE_FIELDS


def test_a_request_asks_for_no_more_tokens_than_the_window_has() -> None:
    facts = EngineFacts(max_model_len=8)
    assert json.loads(encode_request({"max_tokens": 9}, facts)) == {"max_tokens": 8}
    assert json.loads(encode_request({"max_tokens": 7}, facts)) == {"max_tokens": 7}
    with pytest.raises(BadRequest, match="cannot be passed on"):
        encode_request({"max_tokens": 1, "seed": 2**80}, facts)


def test_a_request_in_flight_takes_no_more_memory_than_its_bytes() -> None:
    request = {"max_tokens": 9, "prompt": "hello " * 10_000}
    tracemalloc.start()
    try:
        encoded = encode_request(request, EngineFacts())
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(encoded) < held < 1.1 * len(encoded)


def test_a_plain_server_gets_the_extra_sampling_parameters_that_it_accepts() -> None:
    request = {"max_tokens": 1, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.0, "temperature": 0.5}
    path, body = OpenAIEngine().request(Upstream.CHAT, request, EngineFacts(extra_sampling=frozenset({"top_k"})))
    assert path == "/v1/chat/completions"
    assert json.loads(body or b"") == {"max_tokens": 1, "top_k": 5, "temperature": 0.5}


def test_a_plain_server_cannot_be_given_weights() -> None:
    with pytest.raises(BadRequest, match="cannot be given weights"):
        OpenAIEngine().control("http://e", key=None, timeout=1.0)
