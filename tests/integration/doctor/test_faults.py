"""Every switch of the fake engine, and the doctor's finding. A switch without a finding here fails."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from rig.fake_engine import FakeEngine, Faults
from stepwell.doctor.engine_checks import StreamPatience
from stepwell.doctor.examination import examine
from stepwell.doctor.findings import CaseColumn, Finding, Grade, Report, plain

HURRIED = StreamPatience(first=0.03, token=0.001, silence=0.03)


@dataclass(frozen=True)
class Named:
    """Where the doctor reports a fault, and part of its text."""

    faults: Faults
    where: str
    """A check, or a case and a column."""
    words: str
    grade: Grade = Grade.FAULT


NAN = float("nan")
SWITCHES: dict[str, Sequence[Named]] = {
    "delay_s": [Named(Faults(delay_s=0.05), "stream", "nothing came for ", Grade.WARNING)],
    "token_delay_s": [Named(Faults(token_delay_s=0.002), "stream", "a token takes", Grade.WARNING)],
    "hang_up": [Named(Faults(hang_up=True), "single turn, ids", "Server disconnected")],
    "error_status": [Named(Faults(error_status=500), "single turn, ids", "the fake engine was told to fail")],
    "error_at_token": [
        Named(Faults(error_at_token=3), "single turn, ids", "the engine ended the answer with 'error'"),
        Named(Faults(error_at_token=3), "single turn, stream", "Internal server error"),
    ],
    "abort_at_token": [Named(Faults(abort_at_token=1), "single turn, ids", "broke the answer off 16 times")],
    "disconnect_at_token": [
        Named(Faults(disconnect_at_token=3), "single turn, ids", "broke off in its answer"),
        Named(Faults(disconnect_at_token=3), "stream", "broke off after"),
    ],
    "drop_ids": [
        Named(Faults(drop_ids=True), "single turn, ids", "no_response_ids"),
        Named(Faults(drop_ids=True), "completions, stream", "no_response_ids"),
    ],
    "short_ids": [Named(Faults(short_ids=True), "single turn, logprobs", "logprob_count")],
    "logprob_value": [
        Named(Faults(logprob_value=NAN), "single turn, logprobs", "a log-probability is not finite"),
        Named(Faults(logprob_value=-9999.0), "completions, logprobs", "the engine's floor value"),
        Named(Faults(logprob_value=0.5), "tools, logprobs", "a log-probability is positive"),
        Named(Faults(logprob_value=-9.0), "single turn, rescored", "are 0."),
    ],
    "version_change_at_token": [
        Named(Faults(version_change_at_token=2), "weight version", "changed from 'default' to 'changed'")
    ],
    "new_version": [
        Named(Faults(version_change_at_token=2, new_version="8"), "weight version", "from 'default' to '8' while")
    ],
    "wrong_usage": [Named(Faults(wrong_usage=True), "single turn, ids", "but usage says")],
    "malformed": [
        Named(Faults(malformed="not_json"), "single turn, ids", "the engine's answer is not JSON"),
        Named(Faults(malformed="no_choices"), "single turn, ids", "the engine's answer has no choices"),
        Named(Faults(malformed="not_json"), "single turn, stream", "the engine's stream is not JSON"),
    ],
    "no_done": [Named(Faults(no_done=True), "stream", "ends without [DONE]")],
    "silent_s": [Named(Faults(silent_s=0.05), "stream", "it was silent for ", Grade.WARNING)],
    "silent_at_token": [Named(Faults(silent_s=0.05, silent_at_token=4), "stream", "s after 5 events", Grade.WARNING)],
    "awkward_splits": [Named(Faults(awkward_splits=True), "stream", "events are cut", Grade.WARNING)],
    "invalid_utf8": [
        Named(Faults(invalid_utf8=True), "stream", "bytes that are not UTF-8"),
        Named(Faults(invalid_utf8=True), "single turn, text", "the ids do not decode to the text"),
    ],
    "wrong_id": [
        Named(Faults(wrong_id=True), "single turn, text", "the ids do not decode to the text"),
        Named(Faults(wrong_id=True), "completions, rescored", "apart on average"),
    ],
    "raw_logprobs": [Named(Faults(raw_logprobs=True), "log-probabilities", "raw: before temperature", Grade.WARNING)],
    "ignore_seed": [
        Named(Faults(ignore_seed=True), "single turn, stream", "does not repeat an answer under a seed", Grade.UNKNOWN)
    ],
    "ignore_stop": [Named(Faults(ignore_stop=True), "stop string, text", "did not end the answer")],
    "forget_history": [
        Named(Faults(forget_history=True), "multi-turn, prefix", "at token 0 of its response", Grade.WARNING)
    ],
    "no_tool_parser": [
        Named(Faults(no_tool_parser=True), "tools, ids", '"auto" tool choice requires --enable-auto-tool-choice'),
        Named(Faults(no_tool_parser=True), "tool parser", "off"),
    ],
    "times": [Named(Faults(drop_ids=True, times=1), "single turn, ids", "no_response_ids")],
}


def ways() -> list[tuple[str, Faults]]:
    """Each setting of the switches once; it may be reported in several places."""
    return list({repr(way.faults): (switch, way.faults) for switch in SWITCHES for way in SWITCHES[switch]}.values())


def found(report: Report, where: str) -> Finding:
    case, _, column = where.partition(", ")
    if column:
        return next(row for row in report.rows if row.case == case).cell(CaseColumn(column))
    return next(check for check in report.checks if check.name == where).finding


async def examined(engine: FakeEngine, tiny_model: Path, **more: object) -> Report:
    return await examine(engine.url, tokenizer_path=str(tiny_model), **more)  # type: ignore[arg-type]


def test_every_switch_is_named() -> None:
    assert set(SWITCHES) == {field.name for field in fields(Faults)}


@pytest.mark.parametrize(("switch", "faults"), ways())
async def test_the_fault_is_named(switch: str, faults: Faults, tiny_model: Path) -> None:
    async with FakeEngine() as engine:
        engine.faults = faults
        report = await examined(engine, tiny_model, patience=HURRIED)
    for way in SWITCHES[switch]:
        if repr(way.faults) == repr(faults):  # NaN is not equal to itself
            finding = found(report, way.where)
            assert (finding.grade, way.words in finding.what) == (way.grade, True), plain(report)
            assert finding.remedy or finding.grade is Grade.UNKNOWN
            assert not (report.is_exact and finding.grade is Grade.FAULT)
