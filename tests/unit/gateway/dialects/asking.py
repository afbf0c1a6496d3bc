"""Calls, streams and JSON for the tests of dialects."""

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from stepwell.engines.engine import EXTRA_SAMPLING, EngineFacts
from stepwell.engines.openai import OpenAIEngine
from stepwell.engines.vllm import VllmEngine
from stepwell.gateway.dialects import DIALECTS
from stepwell.gateway.dialects.dialect import DialectContext, ModelCall
from stepwell.gateway.dialects.openai_choices import LONGEST_EVENT, ChoicesReply, ChoicesStream, EventReader

CHAT, COMPLETIONS = DIALECTS[:2]
AROUND = DialectContext(response_length=64)
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


def chat(**fields: Any) -> ModelCall:
    return CHAT.read(json.dumps({"model": "m", "messages": HELLO, **fields}).encode(), AROUND)


def completion(**fields: Any) -> ModelCall:
    return COMPLETIONS.read(json.dumps({"model": "m", "prompt": "hello", **fields}).encode(), AROUND)


def shown(call: ModelCall, reply: ChoicesReply) -> bytes:
    """What the agent gets of a whole answer."""
    return call.dialect.reply(call, reply)


class PassedStream:
    """A stream on its way from an engine to an agent."""

    def __init__(self, call: ModelCall, longest: int = LONGEST_EVENT) -> None:
        self.answer = ChoicesStream(VLLM, keep_ids=call.wants.ids)
        self._events = EventReader(longest)
        self._writer = call.dialect.stream(call)

    def feed(self, data: bytes) -> bytes:
        return self._write(self._events.feed(data))

    def end(self) -> bytes:
        return self._write(self._events.end())

    def finish(self) -> bytes:
        return self._writer.finish(self.answer.usage)

    def _write(self, payloads: Sequence[bytes]) -> bytes:
        chunks = [self.answer.read(payload) for payload in payloads]
        return b"".join(self._writer.chunk(chunk) for chunk in chunks if chunk is not None)


def asked(call: ModelCall, *, plain: bool = False, window: int | None = None) -> dict[str, Any]:
    """What an engine is asked: vLLM, or a plain OpenAI server."""
    kind = PLAIN if plain else VLLM
    extra = frozenset() if plain else frozenset(EXTRA_SAMPLING)
    facts = EngineFacts(token_ids=not plain, extra_sampling=extra, max_model_len=window)
    body = kind.request(call.upstream, call.request, facts).body
    assert body is not None
    return dict(json.loads(body))
