"""What is said in each conversation: the user's messages, the tools' results, and the model's replies, as chat has
them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.bridge_rig.cases import NEXT, QUESTION, TOOLS, called, result
from benchmarks.bridge_rig.talk import Message, Reply

SYSTEM = "You answer questions about cities.\nBe brief."
NONE, ONE, PARALLEL = "none", "one call", "parallel calls"
RESULT = '{"degrees": 4, "wind": "NW"}\n\n'


@dataclass(frozen=True)
class Turn:
    """New messages, and the reply to them."""

    new: Sequence[Message]
    reply: Reply


def _said(last: str) -> Reply:
    return Reply({"role": "assistant", "content": f"Mild: 7 °C 🙂, says {last}"}, last)


def _cycle(question: Message, cities: Sequence[str], answer: Reply) -> list[Turn]:
    """A question, tool calls for these cities, and the answer to their results."""
    return [Turn([question], called(*cities)), Turn([result(city, RESULT) for city in cities], answer)]


def _with_thinking(turns: Sequence[Turn]) -> list[Turn]:
    thoughts = [f"Place {place} is in Norway, so it is cold." for place, _ in enumerate(turns)]
    return [
        Turn(turn.new, Reply({**turn.reply.message, "reasoning": thought}, turn.reply.last))
        for turn, thought in zip(turns, thoughts, strict=True)
    ]


SCRIPTS: Mapping[str, Sequence[Turn]] = {
    NONE: [Turn([QUESTION], _said("Molde")), Turn([NEXT], _said("Bergen")), Turn([QUESTION], _said("Hamar"))],
    ONE: [*_cycle(QUESTION, ["Molde"], _said("Tana")), *_cycle(NEXT, ["Bergen"], _said("Voss"))],
    PARALLEL: [
        *_cycle(QUESTION, ["Molde", "Bergen"], _said("Tana")),
        *_cycle(NEXT, ["Hamar", "Narvik"], _said("Voss")),
    ],
}


def script(kind: str, *, thinks: bool) -> Sequence[Turn]:
    return _with_thinking(SCRIPTS[kind]) if thinks else SCRIPTS[kind]


def tools_of(kind: str) -> list[dict[str, Any]]:
    return [] if kind == NONE else TOOLS
