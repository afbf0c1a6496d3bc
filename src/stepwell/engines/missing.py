"""The abilities that an engine lacks, what that costs, and what to do. The gateway's log, `up` and the doctor say it
alike."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stepwell.engines.engine import EngineFacts, EngineHttp, EngineKind, probe_engine
from stepwell.steps.trainable import RAW, UNKNOWN_MODE

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
