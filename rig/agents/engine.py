"""A fake engine that plays the model of an agent with a task: it answers by what it is asked, not by turns.

Agents send side calls at any moment, beside the task's own, so replies that are merely queued would go astray.
"""

import re
from collections.abc import Mapping, Sequence
from contextvars import ContextVar

from rig.fake_engine import FakeEngine, Reply, ToolCall
from rig.fake_engine.asking import Json

PROMPT = "Which word does note.txt keep in the end?"
NOTE = "The word is heron."
SUMMARY = "So far: the note was read, and has to be read once more."
ASIDE = "Nothing to add."
"""The reply to a side call."""

CONTEXT = 400_000
"""A token is a byte here, and command-line agents send prompts of many kilobytes."""


class TaskEngine(FakeEngine):
    """Makes the `calls` one by one after `prompt`, answers with the word that the last result has, and with `aside` to
    all else. After the prompt of a sub-agent it makes the calls of that one, and it summarises when it is asked to."""

    prompt: str = PROMPT
    calls: tuple[ToolCall, ...] = ()
    delegated: Mapping[str, tuple[ToolCall, ...]] = {}
    """The calls of sub-agents, by their prompt, and those after a summary."""
    compaction: str | None = None
    """What the last message says if it asks for a summary of the conversation."""
    aside: Reply | None = Reply(ASIDE)
    """None: any text, as of a fake engine without a task."""

    def __init__(self) -> None:
        super().__init__(max_model_len=CONTEXT)
        self._answering: ContextVar[Json] = ContextVar("answering")

    def note(self, method: str, path: str, headers: dict[str, str], body: Json) -> None:
        super().note(method, path, headers, body)
        self._answering.set(body)

    def next_replies(self, n: int) -> list[Reply | None]:
        return [self.reply_to(self._answering.get())] * n

    def reply_to(self, body: Json) -> Reply | None:
        messages = body.get("messages") or []
        tools = [tool["function"]["name"] for tool in body.get("tools") or []]
        if self.compaction is not None and messages and self.compaction in str(messages[-1]):
            return Reply(SUMMARY)
        for prompt, calls in {**self.delegated, self.prompt: self.calls}.items():
            asked = [place for place, said in enumerate(messages) if said["role"] == "user" and prompt in str(said)]
            if asked:
                return self._next_of(calls, messages[asked[-1] + 1 :], tools)
        return self.aside

    def _next_of(self, calls: Sequence[ToolCall], later: Sequence[Json], tools: Sequence[str]) -> Reply | None:
        replies = sum(said["role"] == "assistant" for said in later)
        if replies < len(calls) and calls[replies].name in tools:
            return Reply(tool_calls=(calls[replies],))
        results = [str(said["content"]) for said in later if said["role"] == "tool"]
        if results and replies == len(calls) and (word := re.search(r"The word is (\w+)", results[-1])):
            return Reply(f"It keeps {word[1]}.")
        return self.aside
