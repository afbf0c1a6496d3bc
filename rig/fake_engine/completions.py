"""`/v1/completions`, for one prompt."""

from collections.abc import Iterator
from itertools import accumulate

from rig.fake_engine.asking import Ask, Json, RefusedError, common_fields, required, whole
from rig.fake_engine.generation import FINGERPRINT, Generation, others
from rig.fake_engine.sampling import Output
from rig.fake_engine.scoring import prompt_logprobs
from rig.vocabulary import encode, token_name


class Completions:
    def __init__(self, model: str) -> None:
        self._model = model
        """The one served: a request need not name it."""

    def parse(self, body: Json) -> Ask:
        return Ask(
            model=body.get("model") or self._model,
            prompt_ids=_prompt_ids(required(body, "prompt")),
            max_tokens=whole(body, "max_tokens"),
            top_logprobs=whole(body, "logprobs"),
            prompt_logprobs=whole(body, "prompt_logprobs"),
            **common_fields(body, body),
        )

    def answer(self, generation: Generation) -> Json:
        return _envelope(generation) | {
            "choices": [_choice(generation.ask, output) for output in generation.outputs],
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": generation.full_usage(),
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def opening(self, generation: Generation) -> list[Json]:
        return []

    def chunks(self, generation: Generation, output: Output) -> Iterator[Json | None]:
        ask, names = generation.ask, _names(output)
        for k in generation.steps(output):
            finish_reason = generation.finish_at(output, k)
            choice = {
                "index": output.index,
                "text": "".join(output.pieces[k : k + 1]),
                "logprobs": _logprobs(ask, output, names, k, k + 1),
                "finish_reason": finish_reason,
                "stop_reason": output.stop_reason if finish_reason else None,
                "prompt_token_ids": ask.prompt_ids if ask.return_ids and k == 0 else None,
                "token_ids": output.shown_ids[k : k + 1] if ask.return_ids and output.shown_ids is not None else None,
            }
            chunk = _envelope(generation) | {"choices": [choice]}
            if finish_reason and not ask.include_usage:
                chunk["system_fingerprint"] = FINGERPRINT
            yield chunk

    def closing(self, generation: Generation) -> Json:
        return _envelope(generation) | {
            "choices": [],
            "usage": generation.usage(),
            "system_fingerprint": FINGERPRINT,
        }


def _prompt_ids(prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, str):
        return encode(prompt)
    if not all(isinstance(token, int) for token in prompt):
        raise RefusedError(400, "BadRequestError", "the fake engine takes one prompt a request", "prompt")
    if not all(0 <= token < 2**31 for token in prompt):
        raise RefusedError(400, "BadRequestError", "a token id is out of vocabulary", "prompt")
    return prompt


def _envelope(generation: Generation) -> Json:
    return {
        "id": f"cmpl-{generation.id}",
        "object": "text_completion",
        "created": generation.created,
        "model": generation.ask.model,
    }


def _choice(ask: Ask, output: Output) -> Json:
    return {
        "index": output.index,
        "text": "".join(output.pieces),
        "logprobs": _logprobs(ask, output, _names(output), 0, len(output.ids)),
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "token_ids": output.shown_ids if ask.return_ids else None,
        "prompt_logprobs": None if ask.prompt_logprobs is None else prompt_logprobs(ask.prompt_ids),
        "prompt_token_ids": ask.prompt_ids if ask.return_ids else None,
        "routed_experts": None,
    }


def _names(output: Output) -> list[str]:
    return [token_name(*token) for token in zip(output.ids, output.pieces, strict=True)]


def _logprobs(ask: Ask, output: Output, names: list[str], start: int, end: int) -> Json | None:
    if ask.top_logprobs is None:
        return None
    names = names[: len(output.ids)]
    lengths = [len(name) for name in names[:end]]
    return {
        "text_offset": list(accumulate(lengths[start:-1], initial=sum(lengths[:start])))[: len(lengths) - start],
        "token_logprobs": output.logprobs[start:end],
        "tokens": names[start:end],
        "top_logprobs": [_top(ask.top_logprobs, output, names, k) for k in range(start, min(end, len(names)))],
    }


def _top(count: int, output: Output, names: list[str], k: int) -> Json:
    return {names[k]: output.logprobs[k]} | {chr(token): value for token, value in others(count, output.temperature)}
