"""Answers that an engine broke off for a weight update: continued from their tokens into one answer and one step."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from stepwell.engines.fleet import EngineFleet
from stepwell.engines.replica import RefusedReply
from stepwell.errors import EngineUnavailable
from stepwell.gateway.dialects.dialect import ModelCall
from stepwell.gateway.dialects.openai_choices import ABORT, ChoicesReply, ChoicesStream, copy_reasoning, missing_delta
from stepwell.steps.step import JsonObject, VersionSpan, logprobs_array
from stepwell.steps.trainable import constrained_reason
from stepwell.wire.openai import Sampled, Upstream, Usage, text_ids

MOST_ABORTS = 16
"""How often one answer may be broken off. More aborts than this have another cause than weight updates."""
KEPT_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("seed", "stop", "stop_token_ids", "ignore_eos"),
)
"""The sampling parameters that the continuation takes over."""


class Continuation:
    def __init__(self, engines: EngineFleet) -> None:
        self._engines = engines

    async def whole(self, call: ModelCall, reply: ChoicesReply, version: int | None) -> ChoicesReply:
        """The answer with every choice complete. `version` wrote the tokens that it has."""
        choices = list(reply.choices)
        for place, sampled in enumerate(choices):
            if sampled.finish_reason == ABORT:
                choices[place] = sampled = await self._complete(call, sampled, version)
                message = await self._message(call, sampled)
                _replace_choice(reply.message["choices"][place], call, message, sampled)
        usage = _count(choices)
        reply.message["usage"] = _usage_object(usage)
        return ChoicesReply(reply.message, tuple(choices), usage)

    async def stream(
        self, call: ModelCall, answer: ChoicesStream, version: int | None
    ) -> tuple[list[dict[str, Any]], list[Sampled]]:
        """The chunks that complete a stream, and what was sampled in all."""
        chunks: list[dict[str, Any]] = []
        choices = answer.sampled()
        for place, index in enumerate(sorted(answer.choices)):
            if choices[place].finish_reason == ABORT:
                choices[place] = sampled = await self._complete(call, choices[place], version)
                message = await self._message(call, sampled)
                chunks.append(rest_chunk(call, answer, index, message, sampled))
        chunks.append({**answer.head, "choices": [], "usage": _usage_object(_count(choices))})
        return chunks, choices

    async def _complete(self, call: ModelCall, choice: Sampled, version: int | None) -> Sampled:
        if choice.logprobs is None and not len(choice.response_ids):
            choice = replace(choice, logprobs=logprobs_array([]))
        if (
            call.policy is not None
            or call.upstream is not Upstream.CHAT
            or constrained_reason(call.request)
            or choice.logprobs is None
        ):
            # the state of a constraint's grammar is lost with the engine's state; tokens in, tokens out has no adapter
            raise EngineUnavailable("the engine broke the answer off, and it cannot be carried on; ask again")
        written, spans = len(choice.response_ids), list[VersionSpan]()
        if version is not None and written:
            spans.append(VersionSpan(version, 0, written))
        for _ in range(MOST_ABORTS):
            choice, more = await self._extend(call, choice)
            spans += more
            if choice.finish_reason != ABORT:
                covered = sum(span.end - span.start for span in spans) == len(choice.response_ids)
                return replace(choice, version_spans=tuple(spans) if covered else ())
        raise EngineUnavailable(f"the engine broke the answer off {MOST_ABORTS} times")

    async def _extend(self, call: ModelCall, choice: Sampled) -> tuple[Sampled, Sequence[VersionSpan]]:
        written = len(choice.response_ids)
        context = np.concatenate((choice.prompt_ids, choice.response_ids)).tolist()
        got = await self._engines.generate(context, rest_of_sampling(call, written))
        if isinstance(got, RefusedReply):
            text = got.body[:300].decode(errors="replace")
            raise EngineUnavailable(f"the engine refuses to carry its answer on: {text}")
        if got.sampled.logprobs is None or choice.logprobs is None:
            raise EngineUnavailable("the engine continued its answer without log-probabilities")
        if choice.model and got.sampled.model not in ("", choice.model):
            raise EngineUnavailable(f"{got.sampled.model} cannot carry on an answer of {choice.model}; ask again")
        extended = replace(
            choice,
            response_ids=np.concatenate((choice.response_ids, got.sampled.response_ids)),
            logprobs=np.concatenate((choice.logprobs, got.sampled.logprobs)),
            finish_reason=got.sampled.finish_reason,
            stop_string=got.sampled.stop_string,
            model=choice.model or got.sampled.model,
        )
        return extended, [VersionSpan(v, start + written, end + written) for v, start, end in got.version_spans]

    async def _message(self, call: ModelCall, choice: Sampled) -> dict[str, Any]:
        """The message that the tokens of a choice spell."""
        if not len(text_ids(choice)):
            return {"role": "assistant", "content": ""}
        message = await self._engines.derender(call.request, choice)
        copy_reasoning(message)
        return message


def rest_of_sampling(call: ModelCall, written: int) -> JsonObject:
    """The seed is changed: the same seed would draw the same random numbers as for the beginning."""
    kept = {name: call.request[name] for name in KEPT_SAMPLING if call.request.get(name) is not None}
    if isinstance(kept.get("seed"), int):
        kept["seed"] ^= written
    return {**kept, "max_tokens": call.request["max_tokens"] - written}


def _replace_choice(choice: dict[str, Any], call: ModelCall, message: dict[str, Any], sampled: Sampled) -> None:
    """Put the complete answer in place of the engine's."""
    choice["message"] = message
    choice |= _ending(call, message, sampled)
    choice["logprobs"] = {"content": logprob_entries(sampled, 0)}
    if call.wants.ids:
        choice["token_ids"] = sampled.response_ids.tolist()


def rest_chunk(
    call: ModelCall, answer: ChoicesStream, index: int, message: dict[str, Any], sampled: Sampled
) -> dict[str, Any]:
    """The chunk that completes a choice of which the agent has a part."""
    choice = answer.choices[index]
    piece: dict[str, Any] = {"index": index, "delta": missing_delta(choice, message)}
    piece["logprobs"] = {"content": logprob_entries(sampled, choice.shown_tokens)}
    if call.wants.ids:
        piece["token_ids"] = sampled.response_ids[choice.shown_tokens :].tolist()
    return {**answer.head, "choices": [piece | _ending(call, message, sampled)]}


def _ending(call: ModelCall, message: dict[str, Any], sampled: Sampled) -> dict[str, str | None]:
    """How a choice ended. As in vLLM, stop_reason is the stop string."""
    ending = {"finish_reason": finish_reason(call, message, sampled)}
    return ending if sampled.stop_string is None else {**ending, "stop_reason": sampled.stop_string}


def finish_reason(call: ModelCall, message: dict[str, Any], sampled: Sampled) -> str | None:
    """OpenAI's reason: tool_calls if the answer ends in tool calls, unless the agent named the tool."""
    calls = message.get("tool_calls") and not isinstance(call.request.get("tool_choice"), dict)
    return "tool_calls" if calls and sampled.finish_reason == "stop" else sampled.finish_reason


def logprob_entries(choice: Sampled, start: int) -> list[JsonObject]:
    """Log-probabilities from token `start` on, as in a chat's answer."""
    values = () if choice.logprobs is None else choice.logprobs[start:].tolist()
    ids = choice.response_ids[start:].tolist()
    return [
        {"token": f"token_id:{token}", "logprob": value, "bytes": None, "top_logprobs": []}
        for token, value in zip(ids, values, strict=False)
    ]


def _count(choices: Sequence[Sampled]) -> Usage:
    return Usage(len(choices[0].prompt_ids), sum(len(choice.response_ids) for choice in choices))


def _usage_object(usage: Usage) -> dict[str, int]:
    prompt, completion = usage.prompt_tokens or 0, usage.completion_tokens or 0
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
