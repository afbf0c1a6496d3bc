"""The kinds of engines, and what each is and can do. One file per kind of engine; the first kind of `ENGINES` that
recognises a server handles it. A new kind is one file and one row, before OpenAIEngine, which accepts any server that
lists models."""

from stepwell.engines.engine import EngineKind
from stepwell.engines.openai import OpenAIEngine
from stepwell.engines.vllm import VllmEngine

ENGINES: tuple[EngineKind, ...] = (VllmEngine(), OpenAIEngine())
PRIVATE_FIELDS: frozenset[str] = frozenset().union(*(kind.private_fields for kind in ENGINES))
"""Request fields that are forwarded to no engine: a plain server may be any kind behind a proxy."""
