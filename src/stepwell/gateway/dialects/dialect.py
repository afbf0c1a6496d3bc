"""The contract of an API dialect: how an agent's request becomes a ModelCall, and how the answer is written for the
agent.

An engine is always asked in OpenAI's chat or completions form. A dialect translates from and to this form; it knows no
engine. `DIALECTS` in this package lists all dialects; everything particular to one is in its own file.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from stepwell.gateway.dialects.chat_form import OPEN_SEAL, StepSeal
from stepwell.gateway.dialects.openai_choices import ChoicesReply, Wants
from stepwell.gateway.dialects.request_rules import AS_ASKED, NO_MORE, RequestRules, SamplingPolicy
from stepwell.gateway.error_responses import ErrorDetails
from stepwell.pool.api.policy import ChannelPolicy
from stepwell.steps.step import JsonObject
from stepwell.wire.openai import Upstream, Usage


class PromptTexts(NamedTuple):
    """The texts by which a harness's side calls are known; empty if the request has none."""

    system: str = ""
    """The beginning of the first message, if it is a system message."""
    user: str = ""
    """The beginning of the user's last message."""


NO_TEXTS = PromptTexts()


PLACE = re.compile(r"\{(\w+)(:path)?\}")
"""A `{name}` in a path template."""


class CallUrl(NamedTuple):
    """The part of a call's URL below its base_url."""

    path: str = ""
    """The one of the dialect's path templates that it matches."""
    text: str = ""
    """The path and the query as the client sends them."""
    names: Mapping[str, str] = {}
    """The values in the places of the template's `{name}`."""
    query: Mapping[str, str] = {}

    @property
    def is_plain(self) -> bool:
        """Whether the URL says nothing that the template does not say."""
        return not (self.names or self.query)

    @property
    def sent(self) -> str:
        """`text` if it says more than the template, else empty."""
        return "" if self.is_plain else self.text


NO_URL = CallUrl()


@dataclass(frozen=True, slots=True)
class DialectContext:
    """The context that a dialect may use beside the request."""

    response_length: int
    """The longest response that a trainer takes."""
    sampling: SamplingPolicy = AS_ASKED
    seal: StepSeal = OPEN_SEAL
    models: Sequence[str] = ()
    """The models that the request may name, first the one that is trained; none means any."""
    rules: RequestRules = NO_MORE
    url: CallUrl = NO_URL


class ConversationPart(NamedTuple):
    """The part that a call adds to a conversation that is stored with its steps."""

    instructions: Sequence[dict[str, Any]]
    """Messages that stand before the conversation, for this call only."""
    messages: Sequence[dict[str, Any]]
    """The messages that are added."""
    after: str = ""
    """The uid of the step whose stored conversation comes before it; empty if it is the beginning."""
    is_stored: bool = True
    """A later call may continue this one by its uid."""


class ModelCall(NamedTuple):
    """A request that is ready to be forwarded, and what its dialect needs to answer it."""

    dialect: "Dialect"
    upstream: Upstream
    request: dict[str, Any]
    """The request in the upstream form, with every sampling parameter explicit. The engine kind adapts it further."""
    sampling: JsonObject
    """The sampling parameters in force, for the step."""
    stream: bool
    choices_per_prompt: int
    wants: Wants
    texts: PromptTexts = NO_TEXTS
    malformed_history: int = 0
    """Tool calls in the history whose arguments are not a JSON object."""
    context: object = None
    """The dialect's own."""
    uid: str = ""
    """The uid of the step of its first choice, which a dialect may seal into its answer."""
    echoed: tuple[str, ...] = ()
    """The uids of earlier steps that the request sends back sealed, in the order of its history."""
    removed: tuple[str, ...] = ()
    """Fields of the request that are not forwarded."""
    replaced: Mapping[str, Any] = {}
    """Sampling parameters that the agent asked for and does not get."""
    part: ConversationPart | None = None
    """None if the request has the whole conversation, and nobody continues it by its id."""
    policy: ChannelPolicy | None = None
    """The adapter that answers it; None if the engines' own weights do."""


class StreamWriter(Protocol):
    """Writes one streamed answer in the dialect's events. Every returned value consists of whole events."""

    media_type: str

    def chunk(self, chunk: dict[str, Any]) -> bytes:
        """One chunk of the engine's answer, which may be changed in place; b"" if the agent sees nothing of it.

        If the engine broke an answer off, its continuation comes as one more chunk.
        """

    def finish(self, usage: Usage) -> bytes:
        """The end of a complete answer."""

    def fail(self, error: bytes) -> bytes:
        """The end of an answer that failed; `error` is written by `Dialect.error`."""

    def keep_alive(self) -> bytes:
        """An event or comment that changes nothing."""


class TokenCounter(Protocol):
    """A dialect's call that counts the tokens of a prompt, without an answer and without a step."""

    path: str
    """A template below a base_url, like those of the dialect."""
    summary: str
    request_schema: Mapping[str, Any]

    def read(self, raw: bytes, around: DialectContext) -> dict[str, Any]:
        """A chat request without sampling parameters. BadRequest says what is wrong."""

    def reply(self, tokens: int) -> bytes: ...


class Dialect(Protocol):
    """One API for agents. A class that inherits from it has the defaults."""

    name: str
    """The label in metrics and traces."""
    paths: tuple[str, ...]
    """Templates below a base_url, without a slash at the beginning. `{name}` stands for a text without a slash,
    `{name:path}` for any text; `DialectContext.url` has them."""
    query: Mapping[str, Any] = {}
    """The JSON schema of each query parameter that `read` uses, by name."""
    key_header: bytes = b"authorization"
    """The header in which its clients send their key, in small letters. A header of its own has the bare key."""
    summary: str
    """A title for the OpenAPI document."""
    description: str
    unrecorded_description: str
    """The description of the same path at the gateway's root, where nothing is recorded unless a header names a
    trajectory."""
    request_schema: Mapping[str, Any]
    """The JSON schema of a request."""
    token_counter: TokenCounter | None = None
    """None if the dialect has no such call."""

    def read(self, raw: bytes, around: DialectContext) -> ModelCall:
        """BadRequest says what is wrong."""

    def reply(self, call: ModelCall, answer: ChoicesReply) -> bytes:
        """A whole answer with what the agent asked for."""

    def stream(self, call: ModelCall) -> StreamWriter: ...

    def error(self, error: ErrorDetails) -> bytes: ...
