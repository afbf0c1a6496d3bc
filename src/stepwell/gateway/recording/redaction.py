"""Masks steps before they are stored: a user's function finds, in a process of its own, what must not be stored.

- A text is what stands between two special tokens: usually one message. So a message is judged alone, in every turn
  alike, and the tokens of a turn stay a prefix of those of the next one.
- Every token that has a part of a span is masked, also one that has only some bytes of a character. Special tokens are
  never masked.
- A masked token has the id of the mask, its log-probability is 0, and it is not trained. A step with a masked token is
  untrainable: the response was sampled from a context that is not stored.
- A masked step has no conversation digest: a gateway must not continue a conversation from tokens that were masked.
- The function cannot hold up the gateway: it has a time limit, and a process that exceeds it is killed and started
  again. A thread would not do, because a regular expression holds Python's lock until it is done.
- A step over which the function fails is not stored.

The process is `python -m stepwell.gateway.recording.redaction`. Its standard input is a socket to the gateway. It gets
a RedactionJob, answers with the id of the mask or with the reason why there is none, and then answers every list of
tasks with a list of findings, or with the name of the exception. The text of an exception is never sent: it may have
what must not be stored.
"""

import asyncio
import logging
import socket
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgpack
import numpy as np
from numpy.typing import NDArray

from stepwell.common.async_calls import is_async
from stepwell.common.child import FramedChild, framed, read_frame_from
from stepwell.common.imports import load_member
from stepwell.common.processes import dying_with_this_process
from stepwell.common.tokenizers import LoadedTokenizer, TokenDecoder
from stepwell.errors import BadRequest, NotReady, StepwellError
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
REDACTION_FAILED = "redaction_failed"
"""The cause under which steps are counted as lost."""
REDACT_TIMEOUT = 5.0
"""Seconds for the steps of one call, with the time that they wait for those of other calls."""
START_TIMEOUT = 120.0
RESTART_PAUSE = 1.0
COMMAND = (sys.executable, "-m", "stepwell.gateway.recording.redaction")


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


class RedactionJob(NamedTuple):
    function: str
    """The address of the function: module:function or path/to/file.py:function."""
    tokenizer_path: str


def packed(message: object) -> bytes:
    raw: bytes = msgpack.packb(message, unicode_errors="surrogatepass")
    return raw


def unpacked(raw: bytes) -> Any:
    """Lists and named tuples come as tuples."""
    return msgpack.unpackb(raw, use_list=False, unicode_errors="surrogatepass")


def load_redaction(name: str) -> FindSpans:
    """BadRequest says why there is no such function."""
    name, function = load_member(name)
    if not callable(function) or is_async(function):
        raise BadRequest(f"{name} is no plain function; it takes a text and returns the spans (start, end) to mask")
    return function


def main() -> None:
    with socket.socket(fileno=0) as channel, channel.makefile("rb") as stream:
        job = RedactionJob(*unpacked(read_frame_from(stream) or b""))
        try:
            tokenizer = LoadedTokenizer.load(job.tokenizer_path)
            finder, mask = SpanFinder(load_redaction(job.function), tokenizer), mask_id(tokenizer)
        except StepwellError as why:
            channel.sendall(framed(packed(str(why))))
            return
        channel.sendall(framed(packed(mask)))
        while (tasks := read_frame_from(stream)) is not None:
            channel.sendall(framed(packed(_answer(finder, unpacked(tasks)))))


def _answer(finder: SpanFinder, tasks: Any) -> object:
    try:
        return [finder.find(RedactionTask(*task)) for task in tasks]
    except Exception as failure:  # noqa: BLE001 - it is the user's function
        return type(failure).__name__


log = logging.getLogger("stepwell.gateway")


class RedactionFailed(Exception):
    """The steps must not be stored; the text says why, and has nothing of theirs."""


class Redactor:
    """`run` keeps the process running; it belongs to one event loop."""

    def __init__(
        self,
        function: str,
        tokenizer_path: str,
        *,
        timeout: float = REDACT_TIMEOUT,
        restart_pause: float = RESTART_PAUSE,
    ) -> None:
        self._job = RedactionJob(function, tokenizer_path)
        self._timeout = timeout
        self._restart_pause = restart_pause
        self._why: str | None = f"{function} is still loading"
        self._child: RedactionProcess | None = None
        self._ready = asyncio.Event()
        self._turn = asyncio.Lock()
        """The process does one thing at a time."""

    def why_not_ready(self) -> str | None:
        return self._why

    async def redact(self, steps: Sequence[Step]) -> list[Step]:
        """The steps as they may be stored. RedactionFailed if the function fails or is not done in time."""
        tasks, loading = [task_of(step) for step in steps], self._why
        try:
            async with asyncio.timeout(self._timeout):
                await self._ready.wait()
                async with self._turn:
                    mask, answer = await self._ask(tasks)
        except TimeoutError:
            raise RedactionFailed(loading or f"{self._job.function} took more than {self._timeout:g} s") from None
        if isinstance(answer, str):
            raise RedactionFailed(f"{self._job.function} failed with {answer}")
        found = [RedactionFound(*each) for each in answer]
        return [mask_step(step, masked, mask) for step, masked in zip(steps, found, strict=True)]

    async def run(self) -> None:
        """Keep the process running, until cancelled."""
        while True:
            child = None
            try:
                # What the function prints is not kept: it may have what must not be stored.
                child = RedactionProcess(await FramedChild.start(dying_with_this_process(COMMAND)))
                await child.greet(self._job)
                self._child, self._why = child, None
                self._ready.set()
                await child.wait()
                log.warning("the process of %s ended; it is started again", self._job.function)
                self._stop_using()
            except (OSError, EOFError, TimeoutError, NotReady) as failure:
                self._why = str(failure) or f"{self._job.function} was not loaded"
                log.error("no step is stored, because the redaction function does not run: %s", self._why)
            finally:
                self._ready.clear()
                if child is not None:
                    await child.close()
            await asyncio.sleep(self._restart_pause)

    async def _ask(self, tasks: object) -> tuple[int, Any]:
        """A process whose answer nobody read is of no use any more."""
        if (child := self._child) is None:
            raise RedactionFailed(f"{self._job.function} is not running")
        try:
            return child.mask, await child.ask(tasks)
        except (OSError, EOFError):
            raise RedactionFailed(f"{self._job.function} ended its process") from None
        finally:
            if not child.is_idle:
                self._stop_using()
                child.kill()

    def _stop_using(self) -> None:
        self._ready.clear()
        self._child, self._why = None, f"{self._job.function} is started again"


class RedactionProcess:
    def __init__(self, child: FramedChild) -> None:
        self.mask = 0
        self.is_idle = True
        self.kill, self.wait, self.close = child.kill, child.wait, child.close
        self._child = child

    async def greet(self, job: RedactionJob) -> None:
        """NotReady says why the function cannot be loaded."""
        async with asyncio.timeout(START_TIMEOUT):
            told = await self.ask(job)
        if isinstance(told, str):
            raise NotReady(told)
        self.mask = told

    async def ask(self, message: object) -> Any:
        self.is_idle = False
        await self._child.send(packed(message))
        answer = unpacked(await self._child.receive())
        self.is_idle = True
        return answer


if __name__ == "__main__":
    main()
