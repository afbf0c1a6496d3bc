"""Runs a case: the same request whole and streamed, with one seed, and a finding for every column."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from stepwell.doctor.findings import NOTHING, CaseCells, CaseColumn, Finding
from stepwell.doctor.local_gateway import LocalGateway
from stepwell.doctor.replies import CHAT, ExaminedAnswer, ParsedReply
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

SEED = 7
SHORT = 32
"""Tokens of an ordinary answer."""
HELLO: dict[str, Any] = {"role": "user", "content": "Say hello, and how you are."}


@dataclass(frozen=True, slots=True)
class CaseAnswers:
    """One request, answered whole and streamed."""

    whole: ExaminedAnswer
    streamed: ExaminedAnswer
    again: ExaminedAnswer | None
    """The whole answer a second time, if the other two differ."""


class CaseRunner:
    def __init__(self, gateway: LocalGateway, model: str) -> None:
        self.gateway = gateway
        self._model = model

    async def ask(self, path: str = CHAT, **fields: Any) -> ExaminedAnswer:
        """One whole answer."""
        return await self.gateway.ask(path, self._body(fields))

    async def ask_twice(self, path: str = CHAT, **fields: Any) -> CaseAnswers:
        body = self._body(fields)
        return await _twice(lambda stream: self.gateway.ask(path, body, stream=stream))

    async def continue_twice(
        self, first: JsonObject, following: Callable[[ParsedReply], JsonObject]
    ) -> tuple[ExaminedAnswer, CaseAnswers]:
        """The first turn of a conversation, and its second turn, which `following` makes of the first reply."""
        firsts: list[ExaminedAnswer] = []

        async def ask(stream: bool) -> ExaminedAnswer:
            turn, after = await self.gateway.ask_in_turn(
                self._body(first), lambda reply: self._body(following(reply)), stream=stream
            )
            firsts.append(turn)
            return after

        answers = await _twice(ask)
        return firsts[0], answers

    async def judge(
        self,
        answers: CaseAnswers,
        *,
        stop: str = "",
        expected: str | None = None,
        prefix: Finding = NOTHING,
        rescored: Finding | None = None,
    ) -> CaseCells:
        """`stop` is the stop string, `expected` the only text that the grammar allows."""
        whole = answers.whole
        if rescored is None:
            rescored = judge_rescored(whole, [await self.gateway.rescored(step) for step in whole.steps])
        return {
            CaseColumn.IDS: judge_ids(whole),
            CaseColumn.LOGPROBS: judge_logprobs(whole),
            CaseColumn.TEXT: judge_text(whole, stop=stop, expected=expected),
            CaseColumn.STREAM: judge_stream(whole, answers.streamed, answers.again, stop=stop),
            CaseColumn.PREFIX: prefix,
            CaseColumn.RESCORED: rescored,
        }

    async def prefix(self, first: ExaminedAnswer, second: ExaminedAnswer) -> Finding:
        """Whether the second prompt starts with the whole first step. Each answer has one step."""
        if not second.steps or not first.steps:
            return NOTHING
        turn, after = first.steps[0], second.steps[0]
        if (at := prefix_break(turn, after)) is None:
            return judge_prefix(turn, after, ("", ""))
        turn_ids = [*turn.prompt_ids.tolist(), *turn.response_ids.tolist()]
        decoded = [await self.gateway.decode(ids[at:]) for ids in (turn_ids, after.prompt_ids.tolist())]
        before, later = (found.text if found else "" for found in decoded)
        return judge_prefix(turn, after, (before, later))

    def _body(self, fields: JsonObject) -> JsonObject:
        """A field that is None is left out."""
        body = {"model": self._model, "max_tokens": SHORT, "seed": SEED, **fields}
        return {name: value for name, value in body.items() if value is not None}


async def _twice(ask: Callable[[bool], Awaitable[ExaminedAnswer]]) -> CaseAnswers:
    """`ask` is told whether to stream."""
    whole, streamed = await ask(False), await ask(True)
    differs = whole.is_sound and streamed.is_sound and differing(whole, streamed)
    return CaseAnswers(whole, streamed, await ask(False) if differs else None)


def judge_only(answer: ExaminedAnswer) -> CaseCells:
    """The cells of a case that ended after its first answer."""
    return {CaseColumn.IDS: judge_ids(answer), CaseColumn.LOGPROBS: judge_logprobs(answer)}
