"""How a case is asked and judged: whole and streamed under one seed, a finding for every column."""

from dataclasses import dataclass
from typing import Any

from stepwell.doctor.answer import Answer
from stepwell.doctor.findings import NOTHING, Column, Finding, Row
from stepwell.doctor.harness import Bench
from stepwell.doctor.verdicts import (
    differing,
    judge_ids,
    judge_logprobs,
    judge_prefix,
    judge_rescored,
    judge_stream,
    judge_text,
    prefix_break,
)
from stepwell.steps.step import JsonObject
from stepwell.wire.openai import Upstream

SEED = 7
SHORT = 32
"""Tokens of an ordinary answer."""
HELLO: dict[str, Any] = {"role": "user", "content": "Say hello, and how you are."}


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, answered whole and streamed."""

    whole: Answer
    streamed: Answer
    again: Answer | None
    """Whole once more, where the two differ."""


class Asking:
    def __init__(self, bench: Bench, model: str) -> None:
        self.bench = bench
        self._model = model

    async def ask(self, upstream: Upstream = Upstream.CHAT, **fields: Any) -> Answer:
        """Whole, and nothing else."""
        return await self.bench.ask(upstream, self._body(fields))

    async def ask_twice(self, upstream: Upstream = Upstream.CHAT, **fields: Any) -> Asked:
        body = self._body(fields)
        whole = await self.bench.ask(upstream, body)
        streamed = await self.bench.ask(upstream, body, stream=True)
        differs = whole.is_sound and streamed.is_sound and differing(whole, streamed)
        return Asked(whole, streamed, await self.bench.ask(upstream, body) if differs else None)

    async def row(
        self,
        case: str,
        asked: Asked,
        *,
        stop: str = "",
        expected: str | None = None,
        prefix: Finding = NOTHING,
        rescored: Finding | None = None,
    ) -> Row:
        """`stop` is a text that ends the answer, `expected` the only one that it could be."""
        whole = asked.whole
        if rescored is None:
            rescored = judge_rescored(whole, [await self.bench.rescored(step) for step in whole.steps])
        return Row(
            case,
            {
                Column.IDS: judge_ids(whole),
                Column.LOGPROBS: judge_logprobs(whole),
                Column.TEXT: judge_text(whole, stop=stop, expected=expected),
                Column.STREAM: judge_stream(whole, asked.streamed, asked.again, stop=stop),
                Column.PREFIX: prefix,
                Column.RESCORED: rescored,
            },
        )

    async def prefix(self, first: Answer, second: Answer) -> Finding:
        """Whether the second's prompt begins with all of the first's (only) step."""
        if not second.steps or not first.steps:
            return NOTHING
        turn, after = first.steps[0], second.steps[0]
        if (at := prefix_break(turn, after)) is None:
            return judge_prefix(turn, after, ("", ""))
        was = [*turn.prompt_ids.tolist(), *turn.response_ids.tolist()][at:]
        spelled = [await self.bench.spell(ids) for ids in (was, after.prompt_ids.tolist()[at:])]
        before, later = (found.text if found else "" for found in spelled)
        return judge_prefix(turn, after, (before, later))

    def _body(self, fields: dict[str, Any]) -> JsonObject:
        return {"model": self._model, "max_tokens": SHORT, "seed": SEED, **fields}


def recorded_only(case: str, answer: Answer) -> Row:
    """Of a case that went no further than its first answer."""
    return Row(case, {Column.IDS: judge_ids(answer), Column.LOGPROBS: judge_logprobs(answer)})
