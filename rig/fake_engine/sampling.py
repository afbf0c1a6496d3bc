"""Replies without a model: a hash of the prompt chooses the tokens, or a script does."""

import hashlib
import json
import secrets
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

from rig.chatml import render_call
from rig.fake_engine.asking import Ask
from rig.fake_engine.faults import Faults
from rig.fake_engine.scoring import logprobs_of
from rig.vocabulary import END_OF_TURN, encode, pieces

DEFAULT_MAX_TOKENS = 16
SHORTEST, LONGEST = 8, 64
"""How many tokens come before a reply's end of turn, where max_tokens does not cut it off."""

LETTERS = b"abcdefghijklmnopqrstuvwxyz     ."


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: Mapping[str, Any]
    id: str = ""
    """The engine makes one up if it is empty."""

    def arguments_json(self) -> str:
        return json.dumps(self.arguments, ensure_ascii=False)

    def written(self) -> str:
        """The call as the model would write it."""
        return render_call(self.name, self.arguments_json())


@dataclass(frozen=True, slots=True)
class Reply:
    """One canned reply: a text, tool calls, or both. A request's own max_tokens cuts it off, the default does not."""

    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    """Thought before the rest, and told apart from it, as by a reasoning parser."""

    def ids(self) -> list[int]:
        calls = "".join(call.written() for call in self.tool_calls)
        return [*encode(self.thought() + self.text + calls), END_OF_TURN]

    def pieces(self) -> list[str]:
        """The text that each token adds."""
        return pieces(self.ids())

    def thought(self) -> str:
        return f"<think>{self.reasoning}</think>" if self.reasoning else ""

    def thought_length(self) -> int:
        """In tokens, its marks among them."""
        return len(encode(self.thought()))

    def marks(self) -> tuple[int, ...]:
        """The tokens before and after the thought, which are not shown."""
        length = self.thought_length()
        return (0, length - 1) if length else ()

    def call_spans(self) -> list[tuple[int, int]]:
        """Where each tool call begins and ends among the tokens."""
        start = self.thought_length() + len(encode(self.text))
        ends = list(accumulate((len(encode(call.written())) for call in self.tool_calls), initial=start))
        return list(pairwise(ends))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedReply(Reply):
    """A reply of a model with another tokenizer or another way to write: its tokens are given, and how an engine's
    parsers share them out."""

    tokens: tuple[int, ...]
    """To the one that ends it."""
    shown: tuple[str, ...]
    """What each token adds to the reasoning or to the text."""
    thinks: int = 0
    """How many tokens at the start are reasoning."""
    spans: tuple[tuple[int, int], ...] = ()
    """Of the tool calls."""

    def ids(self) -> list[int]:
        return list(self.tokens)

    def pieces(self) -> list[str]:
        return list(self.shown)

    def thought_length(self) -> int:
        return self.thinks

    def marks(self) -> tuple[int, ...]:
        return ()

    def call_spans(self) -> list[tuple[int, int]]:
        return list(self.spans)


@dataclass(slots=True)
class Output:
    """One choice as it was sampled; changed only by an abort that cuts it short."""

    index: int
    ids: list[int]
    logprobs: list[float]
    finish_reason: str
    shown_ids: list[int] | None
    """What is sent as `token_ids`."""

    reply: Reply | None
    """The script's reply, where it came through uncut."""

    pieces: list[str]
    """The text that each token adds."""

    stop_reason: str | None = None
    """The stop string that ended it."""

    thought: int = 0
    """How many tokens at the start are reasoning, its marks among them."""

    marks: tuple[int, ...] = ()
    """Those of them that are not shown."""

    temperature: float = 1.0
    """That of its log-probabilities; 1 if they are raw."""

    versions: list[str] = field(default_factory=list)
    """The weights that wrote each token; grows while the tokens are sent."""

    @property
    def text(self) -> str:
        """Without the reasoning."""
        return "".join(self.pieces[self.thought :])

    @property
    def reasoning(self) -> str | None:
        shown = (piece for k, piece in enumerate(self.pieces[: self.thought]) if k not in self.marks)
        return "".join(shown) if self.thought else None

    def cut(self, k: int, finish_reason: str) -> None:
        """End before token k."""
        self.finish_reason, self.reply = finish_reason, None
        self.shown_ids = None if self.shown_ids is None else self.shown_ids[:k]
        for values in (self.ids, self.logprobs, self.pieces):
            del values[k:]


def sample(ask: Ask, faults: Faults, replies: Sequence[Reply | None]) -> list[Output]:
    """The choices of a request, one for each of `replies`, where None leaves the choice to the hash."""
    return [_sample_one(ask, faults, index, reply) for index, reply in enumerate(replies)]


def _sample_one(ask: Ask, faults: Faults, index: int, reply: Reply | None) -> Output:
    reply = reply or _demanded(ask)
    ids = reply.ids()[: ask.max_tokens] if reply else _unscripted(ask, index, faults)
    finish_reason = "stop" if ids[-1] == (reply.ids()[-1] if reply else END_OF_TURN) else "length"
    for reason, at in (("abort", faults.abort_at_token), ("error", faults.error_at_token)):
        if at is not None and at < len(ids):
            ids, finish_reason = ids[:at], reason
    shown, stop = (reply.pieces()[: len(ids)] if reply else pieces(ids)), None
    if not faults.ignore_stop and (stop := _first_stop("".join(shown), ask.stop)) is not None:
        ids, shown = _stopped(ids, shown, stop)
        finish_reason = "stop"
    temperature = 1.0 if faults.raw_logprobs else ask.temperature
    logprobs = logprobs_of(ids, len(ask.prompt_ids), temperature)
    if faults.logprob_value is not None and logprobs:
        logprobs[len(logprobs) // 2] = faults.logprob_value
    return Output(
        index=index,
        ids=ids,
        logprobs=logprobs,
        finish_reason=finish_reason,
        shown_ids=_shown_ids(ids, faults),
        reply=reply if finish_reason == "stop" and stop is None else None,
        pieces=shown,
        stop_reason=stop,
        thought=reply.thought_length() if reply else 0,
        marks=reply.marks() if reply else (),
        temperature=temperature,
    )


def _unscripted(ask: Ask, index: int, faults: Faults) -> list[int]:
    """What the request holds it to, byte for byte; else what the hash chooses."""
    if ask.choice is not None:
        return [*ask.choice.encode(), END_OF_TURN][: ask.max_tokens]
    return _letters(ask, _noise(ask, index, faults))


def _demanded(ask: Ask) -> Reply | None:
    """A call that must be made, with the simplest arguments."""
    if ask.demanded is None:
        return None
    wanted = (ask.demanded.get("parameters") or {}).get("properties") or {}
    return Reply("", (ToolCall(ask.demanded["name"], dict.fromkeys(wanted, True)),))


def _shown_ids(ids: list[int], faults: Faults) -> list[int] | None:
    if faults.drop_ids:
        return None
    if faults.wrong_id:
        middle = len(ids) // 2
        ids = [*ids[:middle], ord("#"), *ids[middle + 1 :]]
    return ids[:-1] if faults.short_ids else ids


def _first_stop(text: str, stops: Sequence[str]) -> str | None:
    found = [(text.index(stop) + len(stop), stop) for stop in stops if stop in text]
    return min(found)[1] if found else None


def _stopped(ids: list[int], shown: list[str], stop: str) -> tuple[list[int], list[str]]:
    """As in vLLM: the tokens that spell the stop string are there, its text is not."""
    kept, end = "".join(shown).index(stop), 0
    while len("".join(shown[:end])) < kept + len(stop):
        end += 1
    before = next(k for k in range(end + 1) if len("".join(shown[:k])) >= kept)
    return ids[:end], [*shown[:before], *[""] * (end - before)]


def _noise(ask: Ask, index: int, faults: Faults) -> bytes:
    """Bytes that depend on the prompt, the seed and the choice, and on nothing else."""
    seed = secrets.randbits(32) if faults.ignore_seed else ask.seed
    seeded = array("q", [seed, index, *ask.prompt_ids])
    return hashlib.shake_128(seeded.tobytes()).digest(1 + max(ask.max_tokens or 0, LONGEST))


def _letters(ask: Ask, noise: bytes) -> list[int]:
    limit = ask.max_tokens or DEFAULT_MAX_TOKENS
    length = SHORTEST + noise[0] % (LONGEST - SHORTEST)
    if ask.ignore_eos or length >= limit:
        return [LETTERS[byte % len(LETTERS)] for byte in noise[1 : limit + 1]]
    return [*(LETTERS[byte % len(LETTERS)] for byte in noise[1 : length + 1]), END_OF_TURN]
