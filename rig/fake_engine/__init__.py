"""A stand-in for vLLM: a real HTTP server with vLLM's shapes, no model, and switches for everything that can go wrong.

An end-to-end test compares its answers with the real one's. Its words are the tiny model's, so its ids decode with that
tokenizer.
"""

from rig.fake_engine.engine import FakeEngine, Seen
from rig.fake_engine.faults import Faults
from rig.fake_engine.sampling import Reply, TokenizedReply, ToolCall

__all__ = ["FakeEngine", "Faults", "Reply", "Seen", "TokenizedReply", "ToolCall"]
