"""The examination of an engine, from the first question to the report."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from stepwell.common.tokenizers import load_tokenizer
from stepwell.doctor.case_runner import HELLO, Asking
from stepwell.doctor.cases import CASES
from stepwell.doctor.detokenizer import EngineSpeller, LocalSpeller
from stepwell.doctor.engine_checks import Probed, capability_checks, key_check, probe, unreachable, weights_after
from stepwell.doctor.findings import Check, Finding, Mark, Report, Row
from stepwell.doctor.harness import CALL_TIMEOUT, open_bench
from stepwell.doctor.stream_check import PATIENCE, Patience, check_stream
from stepwell.doctor.tool_case import tool_parser
from stepwell.doctor.verdicts import judge_mode
from stepwell.engines.engine import ANSWER_TIMEOUT, EngineProbe
from stepwell.errors import BadRequest, EngineUnavailable

HOT = 1.5
"""A temperature at which log-probabilities before and after it differ, however sure the model is."""


def _silent(_: str) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Patient:
    """What is examined."""

    engine: str
    """Its address."""
    key: str | None = None
    tokenizer_path: str | None = None


async def examine(patient: Patient, *, patience: Patience = PATIENCE, say: Callable[[str], None] = _silent) -> Report:
    """`say` hears what is looked at next."""
    say("the engine")
    key = await key_check(patient.engine, patient.key)
    async with _sessions(patient) as (questions_http, http):
        questions = EngineProbe(questions_http, patient.engine)
        try:
            probed = await probe(questions)
        except EngineUnavailable as failure:
            return Report(patient.engine, (unreachable(str(failure)),))
        checks = capability_checks(probed)
        if probed.is_paused:
            return Report(patient.engine, (*checks, key))
        more, rows = await _ask(patient, probed, http, say)
        say("a stream as it comes")
        stream = Check("stream", await check_stream(http, patient.engine, probed.facts.model, patience))
        changed = weights_after(probed, await questions.weight_version() if probed.weight_version else None)
    checks = [changed if changed and check.name == changed.name else check for check in checks]
    return Report(patient.engine, (*checks, *more, stream, key), rows)


async def _ask(
    patient: Patient, probed: Probed, http: aiohttp.ClientSession, say: Callable[[str], None]
) -> tuple[list[Check], tuple[Row, ...]]:
    model = probed.facts.model
    tokenizer, why = await asyncio.to_thread(_tokenizer, patient.tokenizer_path)
    speller = EngineSpeller(http, patient.engine, model) if tokenizer is None else LocalSpeller(tokenizer)
    async with open_bench(patient.engine, patient.key, tokenizer, speller) as bench:
        asking, rows = Asking(bench, model), dict[str, Row]()
        for name, case in CASES.items():
            say(name)
            rows[name] = await case(asking)
        say("log-probabilities at another temperature")
        checks = [
            Check("log-probabilities", await _mode(asking)),
            Check("chat template", why or await _template(asking, tokenizer)),
            Check("tool parser", tool_parser(rows["tools"])),
        ]
    return checks, tuple(rows.values())


@asynccontextmanager
async def _sessions(patient: Patient) -> AsyncIterator[tuple[aiohttp.ClientSession, aiohttp.ClientSession]]:
    """For short questions, and for calls that take their time."""
    headers = {"Authorization": f"Bearer {patient.key}"} if patient.key else {}
    async with (
        aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(ANSWER_TIMEOUT)) as questions,
        aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(CALL_TIMEOUT)) as calls,
    ):
        yield questions, calls


def _tokenizer(path: str | None) -> tuple[Any, Finding | None]:
    """The tokenizer, or why there is none."""
    if path is None:
        return None, Finding(Mark.UNTOLD, "give --tokenizer-path to compare it with the tokenizer's own")
    try:
        return load_tokenizer(path), None
    except BadRequest as failure:
        return None, Finding(Mark.FAULT, str(failure), "see --tokenizer-path")


async def _mode(asking: Asking) -> Finding:
    """Which log-probabilities the engine reports: of what it sampled from, or of the bare model."""
    answer = await asking.ask(messages=[HELLO], temperature=HOT)
    return judge_mode(answer, [await asking.bench.rescored(step) for step in answer.steps])


async def _template(asking: Asking, tokenizer: Any) -> Finding:
    """Whether the engine writes a prompt as the tokenizer does, which white-box agents and trainers use."""
    answer = await asking.ask(messages=[HELLO], max_tokens=1)
    if not answer.steps:
        return Finding(Mark.UNTOLD, "the engine answers no chat")
    if getattr(tokenizer, "chat_template", None) is None:
        return Finding(Mark.WARNING, "the tokenizer has none; the engine uses another", "give the model's own folder")
    text = tokenizer.apply_chat_template([HELLO], add_generation_prompt=True, tokenize=False)
    if tokenizer.encode(text, add_special_tokens=False) == answer.steps[0].prompt_ids.tolist():
        return Finding(Mark.EXACT, "the engine's prompt is the tokenizer's, token for token")
    what = "the engine writes prompts otherwise than the tokenizer does"
    return Finding(Mark.WARNING, what, "white-box agents need the template of the engine: see its --chat-template")
