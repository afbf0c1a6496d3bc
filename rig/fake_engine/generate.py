"""`/inference/v1/generate`: tokens in, tokens out, and which weights wrote which."""

from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby

from rig.fake_engine.asking import Ask, Json, common_fields, required, whole
from rig.fake_engine.generation import Generation, others
from rig.fake_engine.sampling import Output


class Generate:
    def __init__(self, model: str) -> None:
        self._model = model
        """The one served: here, unlike elsewhere, a request need not name it."""

    def parse(self, body: Json) -> Ask:
        sampling = required(body, "sampling_params")
        return Ask(
            model=body.get("model") or self._model,
            prompt_ids=required(body, "token_ids"),
            max_tokens=whole(sampling, "max_tokens"),
            top_logprobs=whole(sampling, "logprobs"),
            **common_fields(body, sampling),
        )

    def answer(self, generation: Generation) -> Json:
        ask = generation.ask
        return {
            "request_id": _request_id(generation),
            "model": ask.model,
            "created": generation.created,
            "usage": generation.full_usage(),
            "prompt_logprobs": None,
            "prompt_token_id_logprobs": None,
            "prompt_token_ids": ask.prompt_ids if ask.return_ids else None,
            "mm_placeholders": None,
            "metrics": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "output_mode": "tokens",
            "choices": [
                _choice(ask, output, 0, len(output.ids), output.finish_reason) for output in generation.outputs
            ],
        }

    def opening(self, generation: Generation) -> list[Json]:
        return []

    def chunks(self, generation: Generation, output: Output) -> Iterator[Json | None]:
        ask = generation.ask
        for k in generation.steps(output):
            choice = _choice(ask, output, k, k + 1, generation.finish_at(output, k))
            chunk: Json = {
                "request_id": _request_id(generation),
                "usage": None,
                "output_mode": "tokens",
                "choices": [choice],
            }
            if ask.return_ids and k == 0 and output.index == 0:
                chunk["prompt_token_ids"] = ask.prompt_ids
            yield chunk

    def closing(self, generation: Generation) -> Json:
        return {
            "request_id": _request_id(generation),
            "usage": generation.usage(),
            "output_mode": "tokens",
            "choices": [],
        }


def _request_id(generation: Generation) -> str:
    return f"generate-tokens-{generation.id}"


def _choice(ask: Ask, output: Output, start: int, end: int, finish_reason: str | None) -> Json:
    return {
        "index": output.index,
        "finish_reason": finish_reason,
        "stop_reason": output.stop_reason if finish_reason else None,
        "token_ids": output.shown_ids[start:end] if output.shown_ids is not None else None,
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": _spans(output.versions) if finish_reason else None,
        "logprobs": _logprobs(ask, output, start, end),
    }


def _spans(versions: list[str]) -> list[Json]:
    spans: list[Json] = []
    for version, tokens in groupby(versions):
        start = spans[-1]["end"] if spans else 0
        spans.append({"version": version, "start": start, "end": start + len(list(tokens))})
    return spans


def _logprobs(ask: Ask, output: Output, start: int, end: int) -> Json | None:
    if ask.top_logprobs is None:
        return None
    tokens = zip(output.ids[start:end], output.logprobs[start:end], strict=True)
    return {"content": [_entry(token, logprob, ask.top_logprobs, output.temperature) for token, logprob in tokens]}


@lru_cache(maxsize=100_000)
def _entry(token: int, logprob: float, top: int, temperature: float) -> Json:
    """One token's entry; kept, because load tests ask for the same few thousand over and over."""
    ranked = enumerate([(token, logprob), *others(top, temperature)], start=1)
    shown = [{"token_id": other, "logprob": value, "rank": rank} for rank, (other, value) in ranked]
    return shown[0] | {"top_logprobs": shown}
