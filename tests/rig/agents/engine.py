"""A fake engine that plays the model of an agent which is to read a file: it answers by what it is asked, not by turns.

Agents send side calls at any moment, beside the task's own, so replies that are merely queued would go astray.
"""

import re
from contextvars import ContextVar

from tests.rig.fake_engine import FakeEngine, Reply, ToolCall
from tests.rig.fake_engine.asking import Json

PROMPT = "Which word does note.txt keep?"
NOTE = "The word is heron."
ANSWER = "It keeps heron."
ASIDE = "Nothing to add."
"""The reply to a side call."""

CONTEXT = 400_000
"""A token is a byte here, and command-line agents send prompts of many kilobytes."""


class ReadingEngine(FakeEngine):
    """Calls `tool` when PROMPT is new, answers with the word that the tool's result has, and with ASIDE to all else."""

    tool: ToolCall

    def __init__(self) -> None:
        super().__init__(max_model_len=CONTEXT)
        self._answering: ContextVar[Json] = ContextVar("answering")

    def note(self, method: str, path: str, headers: dict[str, str], body: Json) -> None:
        super().note(method, path, headers, body)
        self._answering.set(body)

    def next_replies(self, n: int) -> list[Reply | None]:
        return [self._reply(self._answering.get())] * n

    def _reply(self, body: Json) -> Reply:
        last = body["messages"][-1]
        if last["role"] == "tool" and (found := re.search(r"The word is (\w+)", str(last["content"]))):
            return Reply(f"It keeps {found[1]}.")
        tools = [tool["function"]["name"] for tool in body.get("tools") or []]
        is_new = last["role"] == "user" and PROMPT in str(last["content"])
        return Reply(tool_calls=(self.tool,)) if is_new and self.tool.name in tools else Reply(ASIDE)
