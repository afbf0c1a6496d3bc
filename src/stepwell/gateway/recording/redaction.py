"""The findings of a redaction function in a text, as tokens to mask, and a step with them masked.

- A text is what stands between two special tokens: usually one message. So a message is judged alone, in every turn
  alike, and the tokens of a turn stay a prefix of those of the next one.
- Every token that has a part of a span is masked, also one that has only some bytes of a character. Special tokens are
  never masked.
- A masked token has the id of the mask, its log-probability is 0, and it is not trained. A step with a masked token is
  untrainable: the response was sampled from a context that is not stored.
- A masked step has no conversation digest: a gateway must not continue a conversation from tokens that were masked.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from stepwell.common.tokenizers import LoadedTokenizer, TokenDecoder
from stepwell.errors import BadRequest
from stepwell.steps.step import IntArray, Json, JsonObject, Step
from stepwell.steps.trainable import REDACTED

D = TypeVar("D", bound=np.generic)
Spans: TypeAlias = Sequence[tuple[int, int]]
FindSpans: TypeAlias = Callable[[str], Iterable[tuple[int, int]]]
"""A redaction function: the parts of a text that must not be stored."""

MASKS = ("*", "▁*", "#", "_", "x")
"""Texts of tokens that can be the mask. They are ordinary text: a special token in the middle of a message would end it
for whoever reads messages from tokens."""
MASK_TEXT = "***"
"""The replacement of a span in a text that is stored as text."""
KEPT_SEGMENTS = 20_000
"""Texts whose spans are remembered: a conversation repeats its first messages in every turn."""


class SpansError(Exception):
    """The function returned something else than spans of its text."""


class RedactionTask(NamedTuple):
    """The stored part of one step."""

    ids: bytes
    """The ids of the prompt and the response, as int32."""
    texts: Sequence[str]


class RedactionFound(NamedTuple):
    """The spans that must be masked."""

    tokens: Spans
    """Places in the prompt and the response."""
    texts: Sequence[Spans]


def mask_id(tokenizer: LoadedTokenizer) -> int:
    """The same for every process with this tokenizer: the first of MASKS that is a token, or else the lowest special
    id."""
    found = [token for token in map(tokenizer.id_of, MASKS) if token is not None]
    if not found and not tokenizer.special_ids:
        raise BadRequest("the tokenizer has no token that can stand for what is redacted")
    return found[0] if found else min(tokenizer.special_ids)


class SpanFinder:
    """Runs the function over the texts and tokens of steps."""

    def __init__(self, find: FindSpans, tokenizer: LoadedTokenizer) -> None:
        self._find = find
        self._special_ids = np.fromiter(tokenizer.special_ids, np.int32)
        self._decoder = TokenDecoder(tokenizer)
        self._found: OrderedDict[bytes, Spans] = OrderedDict()
        """The spans by the digest of a segment."""

    def find(self, task: RedactionTask) -> RedactionFound:
        ids = np.frombuffer(task.ids, np.int32)
        tokens = [
            (start + first, start + last)
            for start, end in _segments(ids, self._special_ids)
            for first, last in self._in_segment(ids[start:end])
        ]
        return RedactionFound(tokens, [self._spans(text) for text in task.texts])

    def _in_segment(self, ids: IntArray) -> Spans:
        key = blake2b(ids.tobytes(), digest_size=16).digest()
        if (known := self._found.get(key)) is not None:
            self._found.move_to_end(key)
            return known
        texts = self._decoder.texts(ids.tolist())
        found = self._found[key] = token_spans(texts, self._spans("".join(texts)))
        if len(self._found) > KEPT_SEGMENTS:
            self._found.popitem(last=False)
        return found

    def _spans(self, text: str) -> Spans:
        return merged(_checked(span, len(text)) for span in self._find(text))


def token_spans(texts: Sequence[str], spans: Spans) -> Spans:
    """The runs of tokens that have a part of these spans. A token without a text is a part of what the next token with
    a text completes, and they are masked together."""
    found: list[tuple[int, int]] = []
    coming = deque(merged(spans))
    first = position = 0
    for place, text in enumerate(texts):
        if not text:
            continue
        end = position + len(text)
        while coming and coming[0][1] <= position:
            coming.popleft()
        if coming and coming[0][0] < end:
            found.append((first, place + 1))
        first, position = place + 1, end
    return merged(found)


def merged(spans: Iterable[tuple[int, int]]) -> Spans:
    """The spans in order, without empty ones, and with those that touch made one."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def task_of(step: Step) -> RedactionTask:
    ids = np.concatenate([step.prompt_ids, step.response_ids]).astype(np.int32)
    return RedactionTask(ids.tobytes(), [text for stored in _json_of(step).values() for text in _texts(stored)])


def mask_step(step: Step, found: RedactionFound, mask: int) -> Step:
    """The step itself if nothing must be masked."""
    if not found.tokens and not any(found.texts):
        return step
    texts = iter(found.texts)
    masked: dict[str, Any] = {name: _masked_json(stored, texts) for name, stored in _json_of(step).items()}
    step = replace(step, lineage={}, **masked)
    if not found.tokens:
        return step
    prompt = len(step.prompt_ids)
    in_prompt = [(start, min(end, prompt)) for start, end in found.tokens if start < prompt]
    in_response = [(max(start - prompt, 0), end - prompt) for start, end in found.tokens if end > prompt]
    count = sum(end - start for start, end in found.tokens)
    spans: list[Json] = [[start, end] for start, end in found.tokens]
    return replace(
        step,
        prompt_ids=_filled(step.prompt_ids, in_prompt, mask),
        **_masked_response(step, in_response, mask),
        untrainable=step.untrainable or f"{REDACTED}: --redact masks {count} of its tokens",
        extras={**step.extras, REDACTED: {"mask_id": mask, "tokens": spans}},
    )


def _segments(ids: IntArray, special_ids: IntArray) -> Iterator[tuple[int, int]]:
    """The runs of tokens between special ones."""
    start = 0
    for place in (*np.flatnonzero(np.isin(ids, special_ids)).tolist(), len(ids)):
        if place > start:
            yield start, place
        start = place + 1


def _checked(span: object, length: int) -> tuple[int, int]:
    match span:
        case (int(start), int(end)) if 0 <= start <= end <= length:
            return start, end
    raise SpansError


def _json_of(step: Step) -> dict[str, JsonObject]:
    """The fields that have texts of the agent, or of whoever made the step."""
    return {"metadata": step.metadata, "extras": step.extras, "sampling": step.sampling}


def _texts(stored: object) -> Iterator[str]:
    """All texts in a JSON value, keys included."""
    if isinstance(stored, str):
        yield stored
    elif isinstance(stored, dict):
        for key, value in stored.items():
            yield key
            yield from _texts(value)
    elif isinstance(stored, list | tuple):
        for value in stored:
            yield from _texts(value)


def _masked_json(stored: object, spans: Iterator[Spans]) -> object:
    """A copy with the texts masked. `spans` are those of its texts, in the order of `_texts`."""
    if isinstance(stored, str):
        return _masked_text(stored, next(spans))
    if isinstance(stored, dict):
        return {_masked_text(key, next(spans)): _masked_json(value, spans) for key, value in stored.items()}
    if isinstance(stored, list | tuple):
        return [_masked_json(value, spans) for value in stored]
    return stored


def _masked_text(text: str, spans: Spans) -> str:
    for start, end in reversed(spans):
        text = text[:start] + MASK_TEXT + text[end:]
    return text


def _masked_response(step: Step, spans: Spans, mask: int) -> dict[str, Any]:
    if not spans:
        return {}
    logprobs, trained = step.response_logprobs, step.response_mask
    if trained is None:
        trained = np.ones(len(step.response_ids), np.bool_)
    return {
        "response_ids": _filled(step.response_ids, spans, mask),
        "response_logprobs": None if logprobs is None else _filled(logprobs, spans, 0.0),
        "response_mask": _filled(trained, spans, False),
    }


def _filled(values: NDArray[D], spans: Spans, value: float) -> NDArray[D]:
    filled = values.copy()
    for start, end in spans:
        filled[start:end] = value
    return filled
