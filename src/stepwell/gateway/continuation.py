"""Answers that an engine broke off for a weight update, carried on from their tokens into one answer and one step."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from stepwell.engines.fleet import EngineFleet
from stepwell.engines.replies import RefusedReply
from stepwell.errors import EngineUnavailable
from stepwell.gateway import continued
from stepwell.gateway.continued import ABORT
from stepwell.gateway.dialects.chat import name_both
from stepwell.gateway.dialects.dialect import Kind, ModelCall
from stepwell.gateway.dialects.openai_choices import ChoicesReply, trim_choice
from stepwell.gateway.dialects.sse import StreamReader
from stepwell.steps.step import VersionSpan, logprobs_array
from stepwell.wire.openai import Sampled, Usage, text_ids

MOST_ABORTS = 16
"""How often one answer may be broken off; beyond it, something else is wrong than a weight update."""


class Continuation:
    def __init__(self, engines: EngineFleet) -> None:
        self._engines = engines

    async def whole(self, call: ModelCall, reply: ChoicesReply, version: int | None) -> ChoicesReply:
        """An unstreamed answer, every choice brought to its end. `version` wrote what there is of it."""
        choices = list(reply.choices)
        for choice, sampled in enumerate(choices):
            if sampled.finish_reason == ABORT:
                choices[choice] = await self._to_its_end(call, sampled, version)
                await self._tell(call, reply.message["choices"][choice], choices[choice])
        written = sum(len(choice.response_ids) for choice in choices)
        reply.message["usage"] = continued.usage(len(choices[0].prompt_ids), written)
        return ChoicesReply(reply.message, tuple(choices), Usage(len(choices[0].prompt_ids), written))

    async def stream(self, call: ModelCall, reader: StreamReader, version: int | None) -> tuple[bytes, list[Sampled]]:
        """The events that bring a stream to its end, and what was sampled in all."""
        events, choices = b"", reader.sampled()
        for place, index in enumerate(sorted(reader.choices)):
            if choices[place].finish_reason == ABORT:
                choices[place] = sampled = await self._to_its_end(call, choices[place], version)
                message = await self._message(call, sampled)
                events += continued.rest_of_stream(call, reader.head, index, reader.choices[index], message, sampled)
        if call.wants_usage:
            written = sum(len(choice.response_ids) for choice in choices)
            events += continued.usage_event(reader.head, len(choices[0].prompt_ids), written)
        return events, choices

    async def _to_its_end(self, call: ModelCall, choice: Sampled, version: int | None) -> Sampled:
        if choice.logprobs is None and not len(choice.response_ids):
            choice = replace(choice, logprobs=logprobs_array([]))
        if call.kind is not Kind.CHAT or not continued.can_continue(call) or choice.logprobs is None:
            raise EngineUnavailable("the engine broke the answer off, and it cannot be carried on; ask again")
        written, spans = len(choice.response_ids), list[VersionSpan]()
        if version is not None and written:
            spans.append(VersionSpan(version, 0, written))
        for _ in range(MOST_ABORTS):
            choice, more = await self._more(call, choice)
            spans += more
            if choice.finish_reason != ABORT:
                covered = sum(span.end - span.start for span in spans) == len(choice.response_ids)
                return replace(choice, version_spans=tuple(spans) if covered else ())
        raise EngineUnavailable(f"the engine broke the answer off {MOST_ABORTS} times")

    async def _more(self, call: ModelCall, choice: Sampled) -> tuple[Sampled, Sequence[VersionSpan]]:
        written = len(choice.response_ids)
        context = np.concatenate((choice.prompt_ids, choice.response_ids)).tolist()
        got = await self._engines.generate(context, continued.rest_of_sampling(call, written))
        if isinstance(got, RefusedReply):
            raise EngineUnavailable(
                f"the engine refuses to carry its answer on: {got.body[:300].decode(errors='replace')}"
            )
        if got.sampled.logprobs is None or choice.logprobs is None:
            raise EngineUnavailable("the engine carried its answer on without log-probabilities")
        whole = replace(
            choice,
            response_ids=np.concatenate((choice.response_ids, got.sampled.response_ids)),
            logprobs=np.concatenate((choice.logprobs, got.sampled.logprobs)),
            finish_reason=got.sampled.finish_reason,
            stop_string=got.sampled.stop_string,
        )
        return whole, [VersionSpan(v, start + written, end + written) for v, start, end in got.version_spans]

    async def _message(self, call: ModelCall, choice: Sampled) -> dict[str, object]:
        if not len(text_ids(choice)):
            return {"role": "assistant", "content": ""}
        message = await self._engines.derender(call.request, choice)
        name_both(message)
        return message

    async def _tell(self, call: ModelCall, choice: dict[str, object], sampled: Sampled) -> None:
        """Put the whole answer in place of what the agent would have got."""
        choice["message"] = message = await self._message(call, sampled)
        choice["finish_reason"] = continued.finish_reason(call, message, sampled)
        if call.wants_logprobs:
            choice["logprobs"] = {"content": continued.logprob_entries(sampled, 0)}
        if call.wants_ids:
            choice["token_ids"] = sampled.response_ids.tolist()
        trim_choice(choice, call, "message")
