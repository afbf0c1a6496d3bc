"""The tokens of a scripted reply, as a model writes it that has learned its chat template, and how an engine's parsers
share them out: to the thinking, the text and the tool calls."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import orjson

from benchmarks.bridge_rig.public_templates import NotRendered
from benchmarks.bridge_rig.talk import Message, Reply
from benchmarks.bridge_rig.template_writer import TemplateWriter
from benchmarks.bridge_rig.tokenizing import Tokens
from rig.chatml import render_call
from rig.fake_engine import TokenizedReply, ToolCall
from stepwell.steps.step import ids_array

HALF_A_LETTER = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class ScriptedModel:
    writer: TemplateWriter

    @property
    def tokens(self) -> Tokens:
        return self.writer.tokens

    def reply(self, history: Sequence[Message], tools: Sequence[Any], reply: Reply) -> TokenizedReply:
        """The reply to these messages."""
        text = self.write(history, tools, reply)
        ids = self.tokens.encode(text).tolist()
        return shared_out(reply.message, text, ids, _pieces(self.tokens, ids))

    def write(self, history: Sequence[Message], tools: Sequence[Any], reply: Reply) -> str:
        """A template may have no way to show a tool call, or several. Then the model has its own."""
        message = reply.message
        try:
            written = self.writer.write([*history, message], tools, reply.last)
        except NotRendered:
            text, is_shown = reply.last + self.writer.usual_stop(), False
        else:
            text, is_shown = written.text, bool(written.end)
            if (content := message.get("content") or "") not in text:
                text = content.removesuffix(reply.last) + written.end
        calls = message.get("tool_calls") or []
        if not is_shown:
            stop = text.removeprefix(reply.last)
            functions = [call["function"] for call in calls]
            text = "".join(render_call(one["name"], one["arguments"]) for one in functions) or message["content"]
            text += stop
        thought = message.get("reasoning") or ""
        return text if thought in text else f"<think>\n{thought}\n</think>\n\n{text}"


def shared_out(message: Message, text: str, ids: Sequence[int], pieces: Sequence[str]) -> TokenizedReply:
    """What each token adds to the thinking and the text of that message. What comes after them are its calls."""
    thought, content = (str(message.get(name) or "") for name in ("reasoning", "content"))
    calls: list[Message] = message.get("tool_calls") or []
    thought_at = text.index(thought)
    content_at = text.index(content, thought_at + len(thought)) if content else thought_at + len(thought)
    starts = list(accumulate(map(len, pieces), initial=0))
    begin = next(k for k, start in enumerate(starts) if start >= content_at + len(content))
    thinks = next(k for k, start in enumerate(starts) if start >= thought_at + len(thought)) if thought else 0
    shown = [
        _overlap(piece, start, thought_at, thought) if k < thinks else _overlap(piece, start, content_at, content)
        for k, (piece, start) in enumerate(zip(pieces, starts, strict=False))
    ]
    count, room = len(calls), len(ids) - 1 - begin
    return TokenizedReply(
        text=content,
        reasoning=thought,
        tool_calls=tuple(_tool_call(call) for call in calls),
        tokens=tuple(ids),
        shown=tuple(shown),
        thinks=thinks,
        spans=tuple((begin + n * room // count, begin + (n + 1) * room // count) for n in range(count)),
    )


def _overlap(piece: str, start: int, wanted_at: int, wanted: str) -> str:
    """The part of a piece that is part of the wanted text."""
    return piece[max(0, wanted_at - start) : max(0, wanted_at + len(wanted) - start)]


def _pieces(tokens: Tokens, ids: Sequence[int]) -> list[str]:
    """The text that each token completes."""
    spelled = [tokens.decode(ids_array(ids[:end])).rstrip(HALF_A_LETTER) for end in range(len(ids) + 1)]
    return [after[len(before) :] for before, after in pairwise(spelled)]


def _tool_call(call: Message) -> ToolCall:
    return ToolCall(call["function"]["name"], orjson.loads(call["function"]["arguments"]), call["id"])
