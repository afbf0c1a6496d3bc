"""A plain OpenAI server: text and log-probabilities, no token ids, no pause, no versions. Its steps are graded
`retokenized`."""

from collections.abc import Mapping, Sequence
from typing import Any

from stepwell.engines.engine import (
    EXTRA_SAMPLING,
    EngineControl,
    EngineFacts,
    EngineHttp,
    EngineKind,
    EngineRequest,
    StreamedTokens,
    encode_request,
)
from stepwell.errors import BadRequest, EngineUnavailable
from stepwell.steps.step import JsonObject
from stepwell.wire.openai import NO_IDS, Sampled, Upstream, read_logprob_list, read_model, read_sampled

MODELS = "/v1/models"


class OpenAIEngine(EngineKind):
    name = "openai"
    private_fields: frozenset[str] = frozenset()
    advice: Mapping[str, str] = {
        "token_ids": "use vLLM; steps are only retokenized here, and left out of batches",
        "generate": "use vLLM",
        "derender": "use vLLM",
        "pause": "use vLLM",
        "weight_versions": "use vLLM",
    }

    async def probe(self, http: EngineHttp) -> EngineFacts | None:
        model, window = read_model(await http.require_ok(MODELS))
        label = "a plain OpenAI server, or one that hides its version"
        return EngineFacts(kind=self.name, label=label, model=model, max_model_len=window)

    async def check_health(self, http: EngineHttp) -> None:
        await http.require_ok(MODELS)

    def request(self, upstream: Upstream, request: Mapping[str, Any], facts: EngineFacts) -> EngineRequest:
        return plain_request(upstream, request, facts)

    def read_sampled(self, reply: Mapping[str, Any], choices: Sequence[Mapping[str, Any]]) -> tuple[Sampled, ...]:
        return tuple(read_sampled(reply, choice, NO_IDS) for choice in choices)

    def read_delta(self, piece: Mapping[str, Any], tokens: StreamedTokens) -> None:
        tokens.logprobs += read_logprob_list(piece.get("logprobs"))

    def generation(self, prompt_ids: Sequence[int], sampling: JsonObject, facts: EngineFacts) -> EngineRequest:
        raise EngineUnavailable("a plain OpenAI server gives no token ids: it cannot generate from tokens")

    def control(self, url: str, *, key: str | None, timeout: float) -> EngineControl:
        raise BadRequest(f"{url}: a plain OpenAI server cannot be given weights")


def plain_request(upstream: Upstream, request: Mapping[str, Any], facts: EngineFacts) -> EngineRequest:
    """`request` without the sampling parameters that the engine does not accept."""
    refused = EXTRA_SAMPLING.keys() - facts.extra_sampling
    return EngineRequest(
        upstream, encode_request({name: value for name, value in request.items() if name not in refused}, facts)
    )
