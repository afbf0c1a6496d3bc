"""An answer that the engine broke off (finish_reason abort), carried on from its tokens: what is asked, what is told.

The agent sees one answer. What it was already sent stays; it gets the rest.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from stepwell.errors import EngineUnavailable
from stepwell.gateway.dialects.chat import name_both
from stepwell.gateway.dialects.dialect import ModelCall
from stepwell.gateway.dialects.sampling import why_constrained
from stepwell.gateway.dialects.sse import StreamedChoice
from stepwell.steps.step import JsonObject
from stepwell.wire.openai import Sampled

ABORT = "abort"
SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("seed", "stop", "stop_token_ids", "ignore_eos"),
)
"""What holds for the rest of an answer as it held for its beginning."""


def can_continue(call: ModelCall) -> bool:
    """Not under a constraint: where its grammar stood is lost with the engine's state."""
    return why_constrained(call.request) is None


def rest_of_sampling(call: ModelCall, written: int) -> JsonObject:
    """A seed is changed: the same one again would draw again what the beginning was drawn with."""
    kept = {name: call.request[name] for name in SAMPLING if call.request.get(name) is not None}
    if isinstance(kept.get("seed"), int):
        kept["seed"] ^= written
    return {**kept, "max_tokens": call.request["max_tokens"] - written}


def finish_reason(call: ModelCall, message: Mapping[str, Any], sampled: Sampled) -> str | None:
    """As OpenAI names it: an answer that ends in calls says so, unless the agent itself had named the tool."""
    calls = message.get("tool_calls") and not isinstance(call.request.get("tool_choice"), dict)
    return "tool_calls" if calls and sampled.finish_reason == "stop" else sampled.finish_reason


def logprob_entries(choice: Sampled, start: int) -> list[JsonObject]:
    """Log-probabilities from token `start` on, in chat's shape."""
    values = () if choice.logprobs is None else choice.logprobs[start:].tolist()
    ids = choice.response_ids[start:].tolist()
    return [
        {"token": f"token_id:{token}", "logprob": value, "bytes": None, "top_logprobs": []}
        for token, value in zip(ids, values, strict=False)
    ]


def rest_of_stream(
    call: ModelCall, head: JsonObject, index: int, choice: StreamedChoice, message: Mapping[str, Any], sampled: Sampled
) -> bytes:
    """The event that completes a choice of which the agent has a part, so that it spells `message`."""
    delta = _missing(choice, message)
    if call.wants_reasoning:
        name_both(delta)
    else:
        delta.pop("reasoning", None)
    piece: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None}
    if call.wants_logprobs:
        piece["logprobs"] = {"content": logprob_entries(sampled, choice.told)}
    if call.wants_ids:
        piece["token_ids"] = sampled.response_ids[choice.told :].tolist()
    return event({**head, "choices": [{**piece, "finish_reason": finish_reason(call, message, sampled)}]})


def usage_event(head: JsonObject, prompt_tokens: int, completion_tokens: int) -> bytes:
    return event({**head, "choices": [], "usage": usage(prompt_tokens, completion_tokens)})


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def event(payload: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def _missing(choice: StreamedChoice, message: Mapping[str, Any]) -> dict[str, Any]:
    """The delta that is between what was sent and the whole message."""
    delta: dict[str, Any] = {}
    for name, sent in (("content", choice.content), ("reasoning", choice.reasoning)):
        if rest := _after("".join(sent), message.get(name) or ""):
            delta[name] = rest
    if calls := _missing_calls(choice.arguments, message.get("tool_calls") or []):
        delta["tool_calls"] = calls
    return delta


def _missing_calls(sent: Mapping[int, Sequence[str]], calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    missing: list[dict[str, Any]] = []
    for index, call in enumerate(calls):
        if index not in sent:
            missing.append({**call, "index": index})
        elif rest := _after("".join(sent[index]), call["function"]["arguments"]):
            missing.append({"index": index, "function": {"arguments": rest}})
    return missing


def _after(sent: str, whole: str) -> str:
    """What of `whole` was not sent. Parsers may set blanks otherwise in a whole message than in a streamed one."""
    if whole.startswith(sent):
        return whole[len(sent) :]
    letters = ((place, letter) for place, letter in enumerate(whole) if not letter.isspace())
    end = 0
    for sent_letter in "".join(sent.split()):
        place, letter = next(letters, (0, ""))
        if letter != sent_letter:
            raise EngineUnavailable("the engine spells its answer otherwise than it streamed it; ask again")
        end = place + 1
    return whole[end:]
