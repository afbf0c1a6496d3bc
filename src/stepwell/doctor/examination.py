"""The examination of an engine, from the probe to the report."""

import asyncio
from collections.abc import Callable
from contextlib import closing
from typing import Any

import aiohttp

from stepwell.common.tokenizers import load_tokenizer
from stepwell.doctor.cases import CASES, tool_parser
from stepwell.doctor.engine_checks import (
    PATIENCE,
    StreamPatience,
    capability_checks,
    check_stream,
    key_check,
    unreachable,
)
from stepwell.doctor.findings import CaseRow, Check, Finding, Grade, Report
from stepwell.doctor.harness_trial import harness_named, try_harness
from stepwell.doctor.local_gateway import CALL_TIMEOUT, HELLO, CaseRunner, open_local_gateway
from stepwell.doctor.replies import decode_by_engine, decode_by_tokenizer
from stepwell.doctor.verdicts import judge_mode
from stepwell.engines import ENGINES
from stepwell.engines.capabilities import missing_capabilities
from stepwell.engines.connections import EngineConnections
from stepwell.engines.engine import EngineControl, EngineHttp
from stepwell.engines.replica import EngineReplica, EngineState
from stepwell.errors import BadRequest

HOT = 1.5
"""A temperature at which raw and processed log-probabilities differ for every model."""


def _no_progress(_: str) -> None:
    pass


async def examine(
    address: str,
    *,
    key: str | None = None,
    tokenizer_path: str | None = None,
    harness: str | None = None,
    patience: StreamPatience = PATIENCE,
    show_progress: Callable[[str], None] = _no_progress,
) -> Report:
    """The engine at an address. `show_progress` gets the name of each check before it runs."""
    kind = None if harness is None else harness_named(harness)
    show_progress("the engine")
    key_needed = await key_check(address, key)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with closing(EngineConnections(key)) as connections:
        questions = EngineHttp(connections, address)
        engine = EngineReplica(questions, ENGINES, on_change=lambda: None)
        await engine.check()
        if not engine.probed:
            return Report(address, (unreachable(engine.why),))
        await engine.version_after()
        weights_before = engine.weight_version
        if engine.state is EngineState.PAUSED:
            return Report(address, (*capability_checks(engine, weights_before), key_needed), missing=_missing(engine))
        tokenizer, why = await asyncio.to_thread(_tokenizer, tokenizer_path)
        decode = decode_by_engine(engine.kind, questions, engine.facts.model)
        if tokenizer is not None:
            decode = decode_by_tokenizer(tokenizer)
        async with open_local_gateway(address, key, tokenizer, decode, _rescorer(engine, address, key)) as gateway:
            runner = CaseRunner(gateway, engine.facts.model)
            more, rows = await _run_cases(runner, tokenizer, why, show_progress)
            if kind is not None:
                show_progress(f"the harness {harness}")
                more += await try_harness(gateway, kind)
        show_progress("the bytes of a stream")
        async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(CALL_TIMEOUT)) as http:
            stream = Check("stream", await check_stream(http, address, engine.facts.model, patience))
        await engine.version_after()
    checks = (*capability_checks(engine, weights_before), *more, stream, key_needed)
    return Report(address, checks, rows, _missing(engine))


def _missing(engine: EngineReplica) -> tuple[str, ...]:
    return tuple(map(str, missing_capabilities(engine.kind, engine.facts)))


async def _run_cases(
    runner: CaseRunner, tokenizer: Any, why: Finding | None, show_progress: Callable[[str], None]
) -> tuple[list[Check], tuple[CaseRow, ...]]:
    """`why` is the reason why there is no tokenizer."""
    rows = dict[str, CaseRow]()
    for name, case in CASES.items():
        show_progress(name)
        rows[name] = CaseRow(name, await case(runner))
    show_progress("log-probabilities at another temperature")
    checks = [
        Check("log-probabilities", await _check_logprob_mode(runner)),
        Check("chat template", why or await _check_template(runner, tokenizer)),
        Check("tool parser", tool_parser(rows["tools"])),
    ]
    return checks, tuple(rows.values())


def _rescorer(engine: EngineReplica, address: str, key: str | None) -> EngineControl | None:
    """None if the engine cannot be asked for the log-probabilities of given tokens."""
    try:
        return engine.kind.control(address, key=key, timeout=CALL_TIMEOUT)
    except BadRequest:
        return None


def _tokenizer(path: str | None) -> tuple[Any, Finding | None]:
    """The tokenizer, or the reason why there is none."""
    if path is None:
        return None, Finding(Grade.UNKNOWN, "give --tokenizer-path to compare it with the tokenizer's template")
    try:
        return load_tokenizer(path), None
    except BadRequest as failure:
        return None, Finding(Grade.FAULT, str(failure), "see --tokenizer-path")


async def _check_logprob_mode(runner: CaseRunner) -> Finding:
    """Whether the engine reports log-probabilities of the sampling distribution, or of the model's raw output."""
    answer = await runner.ask(messages=[HELLO], temperature=HOT)
    return judge_mode(answer, [await runner.gateway.rescored(step) for step in answer.steps])


async def _check_template(runner: CaseRunner, tokenizer: Any) -> Finding:
    """Whether the engine renders a prompt like the tokenizer, which white-box agents and trainers use."""
    answer = await runner.ask(messages=[HELLO], max_tokens=1)
    if not answer.steps:
        return Finding(Grade.UNKNOWN, "the engine does not answer chat calls")
    if getattr(tokenizer, "chat_template", None) is None:
        return Finding(
            Grade.WARNING, "the tokenizer has none, but the engine uses one", "give the folder of the served model"
        )
    text = tokenizer.apply_chat_template([HELLO], add_generation_prompt=True, tokenize=False)
    if tokenizer.encode(text, add_special_tokens=False) == answer.steps[0].prompt_ids.tolist():
        return Finding(Grade.EXACT, "the engine's prompt is the tokenizer's, token for token")
    what = "the engine and the tokenizer render the prompt differently"
    return Finding(Grade.WARNING, what, "white-box agents need the engine's template: see its --chat-template")
