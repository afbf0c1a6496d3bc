"""The turns that were sampled in one session, and the sequences that they form. Pure: no calls, no waiting.

- A turn continues a sequence if its prompt begins with every token of it. If there is none (the template dropped the
  thinking, the history was rewritten, another conversation), the turn begins a new sequence.
- Every turn is in at least one sequence, in the order in which the turns were added.
- Several answers to one prompt, choices of one call or answers of several calls, are separate sequences with the same
  beginning: each is a rollout.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from stepwell.envs.scored_data import UNTRAINED, ScoredDataItem
from stepwell.errors import EngineUnavailable
from stepwell.steps.prefix_tree import PrefixTree
from stepwell.steps.step import GRADES, Exactness, FloatArray, IntArray
from stepwell.steps.trainable import logprobs_fault, read_temperature, untrainable_reason
from stepwell.wire.openai import Sampled, read_sampled

NO_LOGPROB = 1.0
"""The entry for tokens that were not sampled: no log-probability is positive."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SampledTurn:
    """One choice of a reply."""

    prompt_ids: IntArray
    response_ids: IntArray
    logprobs: FloatArray | None
    """One per response id; None if the server returned none."""
    exactness: Exactness
    finish_reason: str | None = None
    policy_version: int | None = None
    """The version of the oldest token; None if the server does not report it."""
    temperature: float | None = None
    untrainable: str | None = None
    """Why the policy's trainer would compute with another distribution; None if it does not."""
    model: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class TurnSequence:
    """Turns that continue one another. The tokens of the last turn are the tokens of the whole sequence."""

    turns: tuple[SampledTurn, ...]
    branch: int
    """The branch of the prefix tree that stores the tokens."""
    length: int


@dataclass(frozen=True, slots=True)
class SequenceNode:
    """One conversation: the last prompt and the last response; the responses of all its turns are trained."""

    tokens: list[int]
    masked_tokens: list[int]
    """The token if it is trained, -100 if it is not."""
    logprobs: list[float] | None
    """1.0 for tokens that were not sampled; None if the server returned none for some turn."""
    full_text: str
    """The tokens as text; empty if the session has no tokenizer."""
    metadata: dict[str, Any]
    """`finish_reason` of the last turn, and `turns`, their number."""
    policy_version: int | None
    """The version of the oldest turn whose version is known."""
    exactness: str
    """engine, or retokenized if the tokens of any turn were encoded from text."""
    temperature: float | None = None
    """None if it is not known, or if turns differ."""
    untrainable: str | None = None
    """Why the sequence is left out of training; None if it is not."""
    model: str = ""

    def item(self, score: float, **more: Any) -> ScoredDataItem:
        """The rollout that collect_trajectory returns; `more` are further keys, for example messages or overrides."""
        item = ScoredDataItem(
            tokens=self.tokens,
            masks=self.masked_tokens,
            scores=score,
            inference_logprobs=self.logprobs,
            policy_version=self.policy_version,
            exactness=self.exactness,
        )
        sampled = {"temperature": self.temperature, "untrainable": self.untrainable, "model": self.model or None}
        known = {name: value for name, value in sampled.items() if value is not None}
        return {**item, **known, **more}  # type: ignore[typeddict-item]


class TurnTree:
    """The sequences of one session."""

    def __init__(self) -> None:
        self._tokens = PrefixTree()
        self.sequences: list[TurnSequence] = []
        """All of them, also those that a turn has continued."""
        self.ends: list[TurnSequence] = []
        """The sequences that no turn has continued, in the order in which they began."""

    def add(self, turn: SampledTurn) -> None:
        parent = self._longest_prefix_of(turn.prompt_ids)
        tokens = np.concatenate([turn.prompt_ids, turn.response_ids])
        turns = (*(parent.turns if parent else ()), turn)
        sequence = TurnSequence(turns, self._tokens.place(tokens).branch, len(tokens))
        self.sequences.append(sequence)
        if parent in self.ends:
            self.ends[self.ends.index(parent)] = sequence
        else:
            self.ends.append(sequence)

    def tokens(self, sequence: TurnSequence) -> list[int]:
        return list(self._tokens.read(sequence.branch, sequence.length).tolist())

    def node(self, sequence: TurnSequence, full_text: str) -> SequenceNode:
        temperatures = {turn.temperature for turn in sequence.turns}
        reasons = [turn.untrainable for turn in sequence.turns if turn.untrainable]
        if len(temperatures) > 1:
            reasons.append(f"temperatures: the turns were sampled at {', '.join(map(str, temperatures))}")
        models = {turn.model: None for turn in sequence.turns if turn.model}
        if len(models) > 1:
            reasons.append(f"model: the turns were written by {', '.join(models)}")
        versions = [turn.policy_version for turn in sequence.turns if turn.policy_version is not None]
        return SequenceNode(
            tokens=self.tokens(sequence),
            masked_tokens=_masked_tokens(sequence),
            logprobs=_logprobs(sequence),
            full_text=full_text,
            metadata={"finish_reason": sequence.turns[-1].finish_reason, "turns": len(sequence.turns)},
            policy_version=min(versions, default=None),
            exactness=str(max((turn.exactness for turn in sequence.turns), key=lambda grade: GRADES[grade])),
            temperature=temperatures.pop() if len(temperatures) == 1 else None,
            untrainable=next(iter(reasons), None),
            model=sequence.turns[-1].model,
        )

    def _longest_prefix_of(self, prompt_ids: IntArray) -> TurnSequence | None:
        """The longest sequence that the prompt begins with; of equal ones, the newest."""
        branch, shared = self._tokens.longest_prefix(prompt_ids)
        candidates = (each for each in reversed(self.sequences) if each.length <= shared)
        prefixes = (each for each in candidates if self._tokens.agree(branch, each.branch, each.length))
        return max(prefixes, key=lambda sequence: sequence.length, default=None)


def read_turn(
    reply: dict[str, Any], choice: dict[str, Any], request: Mapping[str, Any], logprobs_mode: str = ""
) -> SampledTurn | None:
    """One choice of the reply to a request; None if it has no token ids."""
    sampled = read_sampled(reply, choice)
    if not len(sampled.prompt_ids) or not len(sampled.response_ids):
        return None
    exactness = Exactness.RETOKENIZED if choice.get("exactness") == Exactness.RETOKENIZED else Exactness.ENGINE
    return turn_of(sampled, exactness, choice, request, logprobs_mode)


def turn_of(
    sampled: Sampled,
    exactness: Exactness,
    choice: Mapping[str, Any],
    request: Mapping[str, Any],
    logprobs_mode: str = "",
) -> SampledTurn:
    """Log-probabilities that do not fit the engine's own ids are an error; with other ids they are left out."""
    logprobs, version = sampled.logprobs, choice.get("policy_version")
    temperature, untrainable = asked_sampling(choice, request, logprobs_mode)
    fault = None if logprobs is None else logprobs_fault(logprobs, len(sampled.response_ids))
    if fault is not None and exactness is Exactness.ENGINE:
        raise EngineUnavailable(f"the server's answer cannot be trained on: {fault}")
    return SampledTurn(
        prompt_ids=sampled.prompt_ids,
        response_ids=sampled.response_ids,
        logprobs=None if fault is not None else logprobs,
        exactness=exactness,
        finish_reason=sampled.finish_reason,
        policy_version=version if isinstance(version, int) else None,
        temperature=temperature,
        untrainable=untrainable,
        model=sampled.model,
    )


def asked_sampling(
    choice: Mapping[str, Any], request: Mapping[str, Any], logprobs_mode: str = ""
) -> tuple[float | None, str | None]:
    """The temperature of a choice, and why it is not trained. The gateway tells how it sampled; of other servers, the
    request does."""
    asked = {**request, **(request.get("extra_body") or {})}
    if "untrainable" in choice:
        reason = choice["untrainable"]
    else:
        reason = untrainable_reason(asked, logprobs_mode=logprobs_mode)
    return read_temperature(choice.get("temperature"), asked), reason


def _masked_tokens(sequence: TurnSequence) -> list[int]:
    masked = np.full(sequence.length, UNTRAINED, np.int32)
    for turn in sequence.turns:
        start = len(turn.prompt_ids)
        masked[start : start + len(turn.response_ids)] = turn.response_ids
    return list(masked.tolist())


def _logprobs(sequence: TurnSequence) -> list[float] | None:
    logprobs = np.full(sequence.length, NO_LOGPROB, np.float32)
    for turn in sequence.turns:
        if turn.logprobs is None:
            return None
        start = len(turn.prompt_ids)
        logprobs[start : start + len(turn.logprobs)] = turn.logprobs
    return list(logprobs.tolist())
