"""The abilities of an engine, found by its behaviour: those that it lacks, what that costs, and what to do. The
gateway's log, `up` and the doctor say it alike.

Whether it reports log-probabilities of the distribution that it samples from is found by asking for the likeliest next
token at two temperatures: raw log-probabilities are the same at both.
"""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from stepwell.engines.engine import EngineFacts, EngineHttp, EngineKind, probe_engine
from stepwell.errors import EngineUnavailable
from stepwell.steps.step import JsonObject
from stepwell.steps.trainable import PROCESSED, RAW, UNKNOWN_MODE
from stepwell.wire.openai import read_object

NOT_JOINED = "so each turn of a conversation is a training row of its own"
COSTS = {
    "token_ids": "no exact steps: replies lack token ids or log-probabilities, so no step is trained by default",
    "renderer": f"turns do not join: the engine does not tell the token ids of a chat, {NOT_JOINED}",
    "template": f"turns do not join: the engine takes no prompt of token ids in a chat, {NOT_JOINED}",
    "logprobs_mode": "raw log-probabilities, or unknown ones: what is sampled at other temperatures than 1 is not "
    "trained",
    "tools": "no tools: the engine refuses calls with tools, so agents that use tools fail",
    "weight_versions": "no weight sync: the engine has no control routes, so it gets no calls after the first policy "
    "version",
    "generate": "no continuation: an answer that a weight update breaks off is lost, as it cannot generate from ids",
}
"""The cost by the name of the fact that shows it."""
PROMPT = "Once upon a time"
TEMPERATURES = (0.5, 2.0)
TOLERANCE = 0.02
"""Half precision may change a log-probability from one call to the next."""
PROBE_USER = "stepwell-probe"
"""The `user` of these requests, by which a server's log can tell them."""
AskForCompletion: TypeAlias = Callable[[JsonObject], Awaitable[bytes | None]]
"""Sends a request for a completion; gives the body of the reply, None if it was refused. EngineUnavailable if there is
none now."""


@dataclass(frozen=True, slots=True)
class MissingCapability:
    fact: str
    """The field of EngineFacts."""
    cost: str
    """The missing ability, and what that costs."""
    remedy: str

    def __str__(self) -> str:
        return f"{self.cost}; {self.remedy}"


def missing_capabilities(kind: EngineKind, facts: EngineFacts) -> list[MissingCapability]:
    """The abilities that the engine lacks; an unknown one is not missing."""
    return [MissingCapability(fact, COSTS[fact], kind.advice.get(fact, "use vLLM")) for fact in _denied(facts)]


async def find_missing(http: EngineHttp, kinds: Sequence[EngineKind]) -> list[MissingCapability]:
    """Asks the engine, for some single tokens too unless it is paused. EngineUnavailable if it does not answer."""
    kind, facts = await probe_engine(http, kinds)
    if not (facts.pause and await kind.is_paused(http)):
        facts = await kind.probe_sampling(http, facts)
    return missing_capabilities(kind, facts)


def _denied(facts: EngineFacts) -> Iterator[str]:
    if not facts.token_ids:
        yield "token_ids"
    elif not facts.template:
        yield "template" if facts.renderer else "renderer"
    if facts.logprobs_mode == RAW or (facts.token_ids and facts.logprobs_mode == UNKNOWN_MODE):
        yield "logprobs_mode"
    if facts.tools is False:
        yield "tools"
    if facts.reports_version and not (facts.pause and facts.weight_versions):
        yield "weight_versions"
    if facts.token_ids and not facts.generate:
        yield "generate"


async def probe_logprobs_mode(ask: AskForCompletion, model: str) -> str:
    """RAW or PROCESSED; UNKNOWN_MODE if the engine does not tell, or the next token is certain at both temperatures."""
    cold, hot = [await _likeliest(ask, model, temperature) for temperature in TEMPERATURES]
    if cold is None or hot is None or min(cold, hot) > -TOLERANCE:
        return UNKNOWN_MODE
    return RAW if abs(cold - hot) <= TOLERANCE else PROCESSED


async def _likeliest(ask: AskForCompletion, model: str, temperature: float) -> float | None:
    """The largest log-probability of a next token."""
    sampling: JsonObject = {"temperature": temperature, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "logprobs": 1}
    raw = await ask({"model": model, "prompt": PROMPT, "max_tokens": 1, "user": PROBE_USER, **sampling})
    try:
        choices: Any = read_object(raw or b"", "answer")["choices"]
        return max(map(float, choices[0]["logprobs"]["top_logprobs"][0].values()))
    except (EngineUnavailable, KeyError, TypeError, ValueError, IndexError, AttributeError):
        return None
