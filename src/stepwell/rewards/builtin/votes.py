"""A judge's reply, read as a vote.

What always holds: a reply in which the score is missing, ambiguous or off the scale is RewardFailed, and is never bent
into a score.
"""

import json
import re
from dataclasses import dataclass

from stepwell.errors import BadRequest, RewardFailed
from stepwell.rewards.builtin.answers import without_reasoning
from stepwell.rewards.builtin.fenced import last_block
from stepwell.steps.step import Json, JsonObject

NUMBER = r"[-+]?\d+(?:\.\d+)?"
NAMED = re.compile(rf"\b(?:score|rating|grade)\b[\"'*_\s]*(?:is|of|:|=)?[\"'*_\s:]*({NUMBER})", re.IGNORECASE)
BRACKETED = re.compile(rf"\[\[\s*({NUMBER})\s*\]\]")
ALONE = re.compile(rf"(?<![\w.])({NUMBER})(?![\w%])")
LONGEST_REASON = 300
"""Characters: a bound that makes every reply end."""


@dataclass(frozen=True, slots=True)
class Scale:
    low: int
    high: int

    def __post_init__(self) -> None:
        if self.low >= self.high:
            raise BadRequest(f"a scale goes up; this one goes from {self.low} to {self.high}")


@dataclass(frozen=True, slots=True)
class Vote:
    value: float
    """From 0 to 1."""
    reason: str = ""


def vote_format(scale: Scale) -> dict[str, Json]:
    """The response_format that holds a judge to its form, where the server has that."""
    schema: dict[str, Json] = {
        "type": "object",
        "properties": {
            "reason": {"type": "string", "maxLength": LONGEST_REASON},
            "score": {"type": "integer", "minimum": scale.low, "maximum": scale.high},
        },
        "required": ["reason", "score"],
        "additionalProperties": False,
    }
    return {"type": "json_schema", "json_schema": {"name": "vote", "strict": True, "schema": schema}}


def read_vote(reply: JsonObject, scale: Scale) -> Vote:
    """The vote in a chat completion."""
    match reply:
        case {"choices": [{"message": {"content": str(text)}}, *_]}:
            return read_text(text, scale)
    raise RewardFailed(f"the judge's server sent no message: {str(reply)[:300]}")


def read_text(text: str, scale: Scale) -> Vote:
    said = without_reasoning(text)
    score, reason = _from_json(text, said)
    if score is None:
        score, reason = _from_words(said, scale), said
    if score is None:
        raise RewardFailed(f"no score can be read from the judge's reply: {text[-300:]!r}")
    if not scale.low <= score <= scale.high:
        raise RewardFailed(f"the judge gave {score:g} on a scale from {scale.low} to {scale.high}")
    return Vote((score - scale.low) / (scale.high - scale.low), reason)


def _from_json(text: str, said: str) -> tuple[float | None, str]:
    """Of the whole text, of what was said after reasoning, of its last fenced block, or from its last brace on.

    Read with Python's own parser, which forgives line breaks within strings; models write them.
    """
    for candidate in (text, said, last_block(said) or "", said[max(said.rfind("{"), 0) :].rstrip("` \n")):
        try:
            match json.loads(candidate, strict=False):
                case {"score": int() | float() | str() as score, **rest} if not isinstance(score, bool):
                    return float(score), _whole(str(rest.get("reason", "")))
        except ValueError:
            continue
    return None, ""


def _whole(text: str) -> str:
    """Without halves of characters, which JSON can spell and nobody can write."""
    return text.encode(errors="replace").decode()


def _from_words(text: str, scale: Scale) -> float | None:
    """What stands in double brackets, N/high, what is called a score, or any number: the first of these that occurs.

    Two different numbers of one kind are one too many.
    """
    out_of = re.compile(rf"(?<![\w.])({NUMBER})\s*(?:/|out of)\s*{scale.high}\b", re.IGNORECASE)
    for pattern in (BRACKETED, out_of, NAMED, ALONE):
        if found := {float(number) for number in pattern.findall(text)}:
            return found.pop() if len(found) == 1 else None
    return None
