"""Calls and JSON for the tests of the wire."""

import json
from typing import Any

from hypothesis import strategies as st

from stepwell.engines.engine import EXTRA_SAMPLING, EngineFacts
from stepwell.engines.openai import OpenAIEngine
from stepwell.engines.vllm import VllmEngine
from stepwell.gateway.dialects.dialect import Kind, ModelCall, read_call

VLLM = VllmEngine()
PLAIN = OpenAIEngine()
HELLO = [{"role": "user", "content": "hello"}]


def _json(*leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        st.one_of(st.none(), st.booleans(), *leaves),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
        max_leaves=10,
    )


JSON = _json(st.integers(-(2**31), 2**40), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=8))
ODD_JSON = _json(st.integers(-(2**70), 2**70), st.floats(), st.text(st.characters(), max_size=8))
"""And what some call JSON: NaN, huge numbers, lone surrogates."""


def objects_with(*names: str, values: st.SearchStrategy[Any] = JSON) -> st.SearchStrategy[dict[str, Any]]:
    """Objects that have some of these fields, whatever is in them."""
    return st.fixed_dictionaries({}, optional=dict.fromkeys(names, values))


def chat(marked: str | None = None, **fields: Any) -> ModelCall:
    raw = json.dumps({"model": "m", "messages": HELLO, **fields}).encode()
    return read_call(Kind.CHAT, raw, response_length=64, marked=marked)


def completion(marked: str | None = None, **fields: Any) -> ModelCall:
    raw = json.dumps({"model": "m", "prompt": "hello", **fields}).encode()
    return read_call(Kind.COMPLETIONS, raw, response_length=64, marked=marked)


def asked(call: ModelCall, *, plain: bool = False, window: int | None = None) -> dict[str, Any]:
    """What an engine is asked: vLLM, or a plain OpenAI server."""
    kind = PLAIN if plain else VLLM
    extra = frozenset() if plain else frozenset(EXTRA_SAMPLING)
    facts = EngineFacts(token_ids=not plain, extra_sampling=extra, max_model_len=window)
    body = kind.request(call.kind.upstream, call.request, facts).body
    assert body is not None
    return dict(json.loads(body))
