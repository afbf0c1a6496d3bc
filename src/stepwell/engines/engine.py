"""The contract of engines: the Protocols that a kind of engine implements, and the values they exchange.

One file per kind implements `EngineKind` (vllm.py, openai.py); `ENGINES` in engines/__init__.py lists the kinds. All
other code reads `EngineFacts` and calls the kind's methods; it never asks which kind an engine is.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import orjson
from yarl import URL

from stepwell.engines.connections import EngineConnections, EngineUnreached, UnreadableReply
from stepwell.errors import BadRequest, EngineUnavailable
from stepwell.steps.step import IntArray, Json, JsonObject, VersionSpan
from stepwell.wire.openai import Sampled, Upstream, Usage

BROKEN = (OSError, UnicodeError, EngineUnreached, UnreadableReply)
"""The exceptions that are raised when a connection fails."""
DEFAULT_MODEL = "default"
"""A request's name for the model that the engine serves, whatever that is; Claw-R1's agents send it."""
NO_TOKENS = "this kind of engine takes no token ids"
QUESTION_TIMEOUT = 5.0
CHANGING = "changing"
"""The version of an engine whose weights nobody knows. "changing from 7": those of version 7 are being replaced, and no
token was sampled since."""
EXTRA_SAMPLING: Mapping[str, float] = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Sampling parameters that OpenAI's API does not have, each with the value that switches it off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """The abilities of an engine, as found by a probe."""

    kind: str = ""
    """Name of its EngineKind; empty before the probe."""
    server_version: str = ""
    """The version that it reports; empty if it reports none."""
    label: str = ""
    """The kind and release of the engine, in words: "vLLM 0.32.0"."""
    tested: str = ""
    """The version that Stepwell was tested with, if this is another; else empty. Nothing depends on it."""
    model: str = ""
    """The first model that it serves."""
    max_model_len: int | None = None
    """Tokens that prompt and response may have together."""
    token_ids: bool = False
    """Replies carry the ids of prompt and response, and a log-probability for each of the latter, so its steps are
    exact."""
    extra_sampling: frozenset[str] = frozenset()
    """The parameters of EXTRA_SAMPLING that it accepts."""
    generate: bool = False
    """The engine has a route that takes token ids and returns token ids."""
    derender: bool = False
    """The engine turns token ids into the chat message that they spell."""
    renderer: str = ""
    """The route that gives the token ids of a chat request without generating; empty if there is none."""
    renders_chat: bool = False
    """`renderer` runs the code that chat calls run. Another one is used only after it gave the ids of a real prompt."""
    template: str = ""
    """A digest of what `renderer` gives for some conversations: engines with the same one have the same chat template
    and tokenizer. Empty if the engine takes no prompt of token ids in a chat request."""
    pause: bool = False
    """The engine can be paused for a weight update, and tells whether it is."""
    reports_version: bool = False
    """Engines of its kind can tell the version of their weights. Then no other version is taken for it."""
    weight_versions: bool = False
    """The engine reports the version of its weights."""
    logprobs_mode: str = ""
    """RAW, PROCESSED or UNKNOWN_MODE, as in steps/trainable.py; empty if it was not asked."""
    tools: bool | None = None
    """The engine takes calls with tools, and parses the model's; None if it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTimeouts:
    """All in seconds."""

    question: float = QUESTION_TIMEOUT
    """The limit for one question of a probe or a check; an engine under full load answers late."""
    connect: float = 30.0
    """The watch notices earlier that an engine is gone; thousands of calls at once may take this long to connect."""
    silence: float = 600.0
    """How long an engine may send nothing, before its reply or within it. A whole reply has no limit."""
    hold: float = 600.0
    """How long a call waits while all engines are paused."""
    unsynced: float = 5.0
    """How long engines that nobody syncs may lack a known version, before calls fail."""


class EngineRequest(NamedTuple):
    path: str
    body: bytes | None
    """None: a GET."""


@dataclass(frozen=True, slots=True)
class Generated:
    """The tokens that an engine sampled from token ids."""

    sampled: Sampled
    usage: Usage
    version_spans: tuple[VersionSpan, ...]
    """Which weights sampled which tokens; empty if the engine does not tell, or not in numbers."""
    version: int | None = None
    """The engine's policy version, as known when the call was sent: no token is older."""
    logprobs_mode: str = ""
    """The `logprobs_mode` of its EngineFacts."""


class StreamedTokens(Protocol):
    """The tokens of one choice of a stream, as far as it was read."""

    ids: list[Any]
    logprobs: list[Any]
    prompt_ids: IntArray | None


class EngineHttp:
    """Short questions to one engine. They use their own connections: calls that wait for a connection do not delay
    them, so a busy engine does not look dead."""

    def __init__(self, connections: EngineConnections, address: str, timeout: float = QUESTION_TIMEOUT) -> None:
        self.address = address
        self._connections = connections
        self._timeout = timeout

    async def ask(self, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Status and body of the reply to a GET, or to a POST of `body`. EngineUnavailable if there is no reply."""
        try:
            async with asyncio.timeout(self._timeout):
                reply = await self._connections.request(URL(self.address + path), body)
                try:
                    return reply.status, await reply.read()
                finally:
                    reply.close()
        except TimeoutError:
            raise EngineUnavailable(f"{path} does not answer within {self._timeout:g} s") from None
        except (*BROKEN, ValueError) as failure:
            raise EngineUnavailable(failure_text(failure)) from None

    async def field(self, path: str, name: str) -> Json:
        """One field of the JSON object at `path`; None if there is none."""
        status, body = await self.ask(path)
        try:
            answer = orjson.loads(body) if status == 200 else None
        except orjson.JSONDecodeError:
            return None
        return answer.get(name) if isinstance(answer, dict) else None

    async def require_ok(self, path: str) -> bytes:
        """The body at `path`; EngineUnavailable unless the status is 200."""
        status, body = await self.ask(path)
        if status != 200:
            raise EngineUnavailable(f"{path} answers {status}")
        return body


class EngineKind(Protocol):
    """Everything that is particular to one kind of engine. Instances hold no state.

    A kind inherits the methods of what its facts deny: they answer None or raise EngineUnavailable.
    """

    name: str
    private_fields: frozenset[str]
    """Request fields that reach the engine's internals, its files or the requests of others; never forwarded."""
    advice: Mapping[str, str]
    """How to get what a fact denies, by the name of the fact; `resume` ends a pause."""

    async def probe(self, http: EngineHttp) -> EngineFacts | None:
        """None if the server is not of this kind. EngineUnavailable if it cannot be reached or lists no model."""

    async def check_health(self, http: EngineHttp) -> None:
        """EngineUnavailable says what is wrong."""

    async def is_paused(self, http: EngineHttp) -> bool | None:
        """None if it does not answer: an engine that loads weights is healthy and silent."""
        return None

    async def weight_version(self, http: EngineHttp) -> str | None:
        """None if it does not answer."""
        return None

    async def probe_sampling(self, http: EngineHttp, facts: EngineFacts) -> EngineFacts:
        """The facts, with those that an engine shows only when it samples. It must not be paused: it is asked for some
        single tokens. EngineUnavailable if it does not answer now."""
        return facts

    async def detokenize(self, http: EngineHttp, model: str, ids: Sequence[int]) -> str | None:
        """The text of token ids, with control tokens; None if the engine does not tell."""
        return None

    def request(self, upstream: Upstream, request: Mapping[str, Any], facts: EngineFacts) -> EngineRequest:
        """`request` with the fields that yield token ids, without fields that the engine refuses, and with max_tokens
        no larger than its window."""

    def exact_request(self, request: Mapping[str, Any], prompt_ids: Sequence[int], facts: EngineFacts) -> EngineRequest:
        """The request for a chat whose prompt is these ids. The messages are sent too: parsers may read them."""
        raise EngineUnavailable(NO_TOKENS)

    def rendering(self, request: Mapping[str, Any], facts: EngineFacts) -> EngineRequest:
        """A request for the ids of the prompt of a chat request."""
        raise EngineUnavailable(NO_TOKENS)

    def read_rendered(self, raw: bytes) -> IntArray:
        """The ids; none if they cannot be read."""
        raise EngineUnavailable(NO_TOKENS)

    def read_sampled(self, reply: Mapping[str, Any], choices: Sequence[Mapping[str, Any]]) -> tuple[Sampled, ...]:
        """The ids and log-probabilities of a whole reply, one entry per choice."""

    def read_prompt(self, chunk: Mapping[str, Any]) -> IntArray | None:
        """The prompt's ids from a chunk of a stream; None if this chunk has no place for them."""
        return None

    def read_delta(self, piece: Mapping[str, Any], tokens: StreamedTokens) -> None:
        """Adds the ids and log-probabilities of one piece of a streamed choice to `tokens`."""

    def hide_prompt(self, reply: dict[str, Any]) -> None:
        """Removes the prompt's ids from a reply or chunk."""
        return

    def hide_tokens(self, choice: dict[str, Any]) -> None:
        """Removes the ids from a choice, or a piece of one."""
        return

    def generation(self, prompt_ids: Sequence[int], sampling: JsonObject, facts: EngineFacts) -> EngineRequest:
        """A request to sample from token ids. EngineUnavailable if the engine cannot."""

    def read_generated(self, raw: bytes, prompt_ids: Sequence[int], facts: EngineFacts) -> Generated:
        raise EngineUnavailable(NO_TOKENS)

    def derender(self, request: Mapping[str, Any], sampled: Sampled) -> EngineRequest:
        """A request for the chat message that the tokens of `sampled` spell, sampled as a reply to `request`."""
        raise EngineUnavailable(NO_TOKENS)

    def read_derendered(self, raw: bytes, sampled: Sampled) -> dict[str, Any]:
        """The message; all its parts are of the right type."""
        raise EngineUnavailable(NO_TOKENS)

    def token_count(self, request: Mapping[str, Any], facts: EngineFacts) -> EngineRequest:
        """A request for the number of tokens of a chat request's prompt. BadRequest if the engine cannot tell."""
        raise BadRequest("this kind of engine does not count tokens")

    def read_token_count(self, raw: bytes) -> int:
        raise EngineUnavailable(NO_TOKENS)

    def control(self, url: str, *, key: str | None, timeout: float) -> "EngineControl":
        """BadRequest if engines of this kind cannot be controlled."""


class EngineControl(Protocol):
    """One engine as a trainer controls it, by blocking calls. No call is repeated. A failure is SyncFailed, or
    EngineSilent if there is no answer; its text names the engine, the call and the reply, and never the key."""

    url: str

    def pause(self) -> None:
        """Holds the calls in progress and discards what was computed for them."""

    def abort(self) -> None:
        """Pauses, and ends the calls in progress with finish_reason "abort"."""

    def resume(self) -> None: ...

    def is_paused(self) -> bool: ...

    def set_version(self, version: str) -> None:
        """A number, or one that begins with CHANGING."""

    def version(self) -> str: ...

    def drop_prefixes(self) -> None:
        """Empties the prefix cache: the new weights must not read what the old ones computed."""

    def logprobs(self, ids: Sequence[int]) -> list[float]:
        """The log-probability of each token but the first."""

    def checksums(self) -> Mapping[str, str] | None:
        """The SHA-256 of each of its tensors, by rank and name; None if it cannot tell."""

    def adapters(self) -> Sequence[str]:
        """The names that it serves, with that of its own weights."""

    def load_adapter(self, name: str, folder: Path) -> None:
        """Serves the LoRA adapter in `folder`, a path on the engine's machine, under that name. One that it already
        serves is all right."""

    def unload_adapter(self, name: str) -> None:
        """One that it does not serve is all right."""

    def load_checkpoint(self, folder: Path) -> None:
        """Loads the weights in `folder`, a path on the engine's machine."""


async def probe_engine(http: EngineHttp, kinds: Sequence[EngineKind]) -> tuple[EngineKind, EngineFacts]:
    """The first of `kinds` that recognises the engine. EngineUnavailable if none does."""
    for kind in kinds:
        if (facts := await kind.probe(http)) is not None:
            return kind, facts
    raise EngineUnavailable(f"{http.address} is none of these: {', '.join(kind.name for kind in kinds)}")


def encode_request(request: Mapping[str, Any], facts: EngineFacts) -> bytes:
    """JSON, with the engine's own model for "default", and max_tokens no larger than its window."""
    window = facts.max_model_len
    if window is not None and request.get("max_tokens", 0) > window:
        request = {**request, "max_tokens": window}
    if request.get("model") == DEFAULT_MODEL:
        request = {**request, "model": facts.model}
    try:
        # a copy, because what orjson returns keeps eight times the memory of its texts, for as long as the call takes
        return bytes(memoryview(orjson.dumps(request)))
    except orjson.JSONEncodeError as failure:  # orjson reads deeper nesting than it writes
        raise BadRequest(f"the request body cannot be passed on: {failure}") from None


def changing_from(version: str) -> str:
    """The version of an engine while its weights are replaced."""
    return version if version.startswith(CHANGING) else f"{CHANGING} from {version}"


def sampled_by(version: str) -> int | None:
    """The number of the weights that sampled what an engine has sampled until now; None if they have none."""
    number = version.removeprefix(f"{CHANGING} from ")
    return int(number) if number.isdecimal() else None


def engine_address(text: str) -> str:
    """The address as all processes write it. BadRequest if it is no address."""
    if not text.startswith(("http://", "https://")):
        raise BadRequest(f"{text!r} is not an address; write http://host:port")
    return text.rstrip("/")


def failure_text(failure: Exception) -> str:
    """Some exceptions have no text."""
    return str(failure) or type(failure).__name__
