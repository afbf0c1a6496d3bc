"""Text in a request that looks like a chat template's markers.

An engine reads such text as markers: a message can hold what seems to be several turns. Nobody can tell them from real
ones later, so the step says that its turns are not to be read.
"""

from typing import Any

from stepwell.gateway.dialects.dialect import ModelCall
from stepwell.steps.conversation import MARKERS
from stepwell.wire.openai import Upstream

ESCAPED = (b"\\u003", b"\\u007")
"""So begin < and | where a JSON text escapes them."""
DEPTH = 12
"""Of objects and lists in a message; what is deeper is taken as a marker."""


def writes_markers(call: ModelCall, raw: bytes) -> bool:
    """Whether a message or tool of a chat call writes a marker. A completion's prompt is the agent's own template."""
    if call.upstream is not Upstream.CHAT:
        return False
    if call.part is None and not _may_write_markers(raw):
        return False
    return _has_marker(call.request["messages"]) or _has_marker(call.request.get("tools"))


def _may_write_markers(raw: bytes) -> bool:
    """Quick: one character, or a long text, is found several times as fast as two characters."""
    return (b"|" in raw and b"<|" in raw) or (b"\\u00" in raw and any(escaped in raw for escaped in ESCAPED))


def _has_marker(value: Any, depth: int = 0) -> bool:
    if isinstance(value, str):
        return "<|" in value and any(marker in value for marker in MARKERS)
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list):
        return depth > DEPTH or any(_has_marker(each, depth + 1) for each in value)
    return False
