"""The turns that were sampled in one session, the sequences that they form, and how the calls of a group were sampled.

- A turn continues a sequence if its prompt begins with every token of it. If there is none (the template dropped the
  thinking, the history was rewritten, another conversation), the turn begins a new sequence.
- Every turn is in at least one sequence, in the order in which the turns were added.
- Several answers to one prompt, choices of one call or answers of several calls, are separate sequences with the same
  beginning: each is a rollout.
- Text of servers that return no ids is encoded with the model's tokenizer, and graded lower. Plain text is encoded as
  it is. A message with tool calls or thinking is encoded as the chat template renders it in a history. The token that
  ends a turn is sampled but not shown, so it is added if the reply was not cut off.
- A call is noted in the group whose task makes it, or a task that this task has started. Calls of evaluations are not.
- A group that does not say its temperature itself gets one if every call of it had the same. Otherwise (other players,
  judges, calls without a temperature) it is not known, and the group gets none. A call whose temperature does not
  describe its distribution (top_p, penalties) counts as one without. That of a greedy call does: nobody may take its
  group for sampled at another one.
"""

import asyncio
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from stepwell.common.tokenizers import load_tokenizer
from stepwell.envs.scored_data import UNTRAINED, ScoredDataGroup, ScoredDataItem
from stepwell.errors import BadRequest, EngineUnavailable
from stepwell.steps.prefix_tree import PrefixTree
from stepwell.steps.step import GRADES, Exactness, FloatArray, IntArray, ids_array
from stepwell.steps.trainable import SMALLEST_TEMPERATURE, logprobs_fault, read_temperature, untrainable_reason
from stepwell.wire.openai import Sampled, read_ids, read_sampled

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


# -- servers that return only text -------------------------------------------------------------------------------------

MORE_THAN_TEXT = ("tool_calls", "reasoning", "reasoning_content")


class TokenizerCache:
    """Each tokenizer is loaded once, when it is first needed."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}
        self._loading = asyncio.Lock()

    async def named(self, name: str) -> Any:
        async with self._loading:
            if name not in self._loaded:
                try:
                    self._loaded[name] = await asyncio.to_thread(load_tokenizer, name)
                except BadRequest as failure:
                    raise BadRequest(f"{failure}; name the model's own in tokenizer_name") from None
            return self._loaded[name]


def encoded_turn(tokenizer: Any, request: Mapping[str, Any], choice: dict[str, Any], place: int) -> SampledTurn:
    """The choice at `place` of the reply to the request."""
    try:
        prompt, text = _prompt_and_text(tokenizer, request, choice, place)
    except EngineUnavailable:
        raise
    except Exception as failure:  # noqa: BLE001 - chat templates raise anything
        why = " ".join(str(failure).split())
        raise EngineUnavailable(f"the server gives no token ids, and the chat cannot be encoded again: {why}") from None
    sampled = replace(read_sampled({}, choice), prompt_ids=prompt)
    encoded = replace(sampled, response_ids=_response_ids(tokenizer, sampled, text))
    return turn_of(encoded, Exactness.RETOKENIZED, choice, request)


def _prompt_and_text(
    tokenizer: Any, request: Mapping[str, Any], choice: Mapping[str, Any], place: int
) -> tuple[IntArray, str]:
    if "messages" not in request:
        prompt = _prompt_at(request, place)
        ids = ids_array(tokenizer.encode(prompt)) if isinstance(prompt, str) else read_ids(list(prompt))
        return ids, str(choice.get("text") or "")
    rendered = _rendered(tokenizer, request, (), add_generation_prompt=True)
    message = choice.get("message") or {}
    text = str(message.get("content") or "")
    if any(message.get(name) for name in MORE_THAN_TEXT):
        text = _rest(rendered, _rendered(tokenizer, request, (message,), add_generation_prompt=False))
    return ids_array(tokenizer.encode(rendered, add_special_tokens=False)), text


def _prompt_at(request: Mapping[str, Any], place: int) -> str | Sequence[int]:
    """The prompt of the choice: choices come in the order of the prompts."""
    prompt: Any = request["prompt"]
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return prompt  # type: ignore[no-any-return]
    return prompt[place // (request.get("n") or 1)]  # type: ignore[no-any-return]


def _rest(prompt: str, whole: str) -> str:
    if not whole.startswith(prompt):
        raise EngineUnavailable("the chat template renders an answer in a history otherwise: it cannot be encoded")
    return whole[len(prompt) :]


def _response_ids(tokenizer: Any, sampled: Sampled, text: str) -> IntArray:
    """The ids before the end of the turn, then the end token, unless the reply was cut off or has exactly one
    log-probability for each of the other tokens."""
    ids, end = list(tokenizer.encode(text, add_special_tokens=False)), tokenizer.eos_token_id
    if end in ids:
        ids = ids[: ids.index(end)]
    logprob_count = None if sampled.logprobs is None else len(sampled.logprobs)
    is_ended = sampled.finish_reason not in (None, "length") and end is not None and logprob_count != len(ids)
    return ids_array([*ids, end] if is_ended else ids)


def _rendered(tokenizer: Any, request: Mapping[str, Any], more: Sequence[Any], **options: bool) -> str:
    messages = [_for_template(message) for message in (*request["messages"], *more)]
    return str(tokenizer.apply_chat_template(messages, tools=request.get("tools") or None, tokenize=False, **options))


def _for_template(message: Any) -> dict[str, Any]:
    """The message with the arguments of tool calls as objects, which templates expect."""
    plain = dict(message if isinstance(message, Mapping) else message.model_dump(exclude_none=True))
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_with_arguments_object(call) for call in plain["tool_calls"]]
    return plain


def _with_arguments_object(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        function["arguments"] = json.loads(function["arguments"] or "{}")
    return {**call, "function": function}


# -- the temperature of a group ----------------------------------------------------------------------------------------

AskedSampling: TypeAlias = tuple[float | None, str | None]
"""The temperature, and why the answer does not represent the policy."""
_noted: ContextVar[set[float | None] | None] = ContextVar("noted", default=None)


@contextmanager
def noting_sampling() -> Iterator[None]:
    token = _noted.set(set())
    try:
        yield
    finally:
        _noted.reset(token)


def note_sampling(answers: Iterable[AskedSampling]) -> None:
    noted = _noted.get()
    if noted is not None:
        noted.update(
            temperature if reason is None or is_greedy(temperature) else None for temperature, reason in answers
        )


def is_greedy(temperature: float | None) -> bool:
    return temperature is not None and temperature < SMALLEST_TEMPERATURE


def add_temperatures(group: ScoredDataGroup) -> None:
    """Adds the temperatures that are known, if the group has neither temperatures nor the parameters that it was
    sampled with."""
    noted = _noted.get() or set()
    if group.get("temperatures") or group.get("generation_params") or len(noted) != 1:
        return
    (temperature,) = noted
    if temperature is not None:
        group["temperatures"] = [temperature] * len(group["tokens"])
