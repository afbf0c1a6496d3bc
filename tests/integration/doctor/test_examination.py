"""The doctor against a fake engine that is sound, of another kind, or unreachable."""

from pathlib import Path

from rig.fake_engine import FakeEngine
from rig.gateways import free_port
from stepwell.doctor.examination import examine
from stepwell.doctor.findings import CaseColumn, Grade, plain
from tests.integration.doctor.test_faults import examined, found

COLUMNS = (CaseColumn.IDS, CaseColumn.LOGPROBS, CaseColumn.TEXT, CaseColumn.STREAM)


async def test_a_sound_engine_is_exact_in_every_case(tiny_model: Path) -> None:
    async with FakeEngine() as engine:
        report = await examined(engine, tiny_model)
    assert report.is_exact, plain(report)
    cells = {f"{row.case}, {column}": row.cell(column).grade for row in report.rows for column in COLUMNS}
    assert cells.pop("reasoning, text") is Grade.UNKNOWN, "it does not think"
    assert set(cells.values()) == {Grade.EXACT}, plain(report)
    kept = {row.case for row in report.rows if row.cell(CaseColumn.PREFIX).grade is Grade.EXACT}
    assert kept == {"multi-turn", "tools", "bridge"}, plain(report)
    rescored = {row.case for row in report.rows if row.cell(CaseColumn.RESCORED).grade is Grade.EXACT}
    assert rescored == {row.case for row in report.rows} - {"tools", "unicode"}
    assert found(report, "chat template").grade is Grade.EXACT
    assert found(report, "log-probabilities").what.startswith("processed")
    assert found(report, "tool parser").grade is Grade.OK


async def test_without_a_tokenizer_the_engine_decodes_its_tokens() -> None:
    async with FakeEngine() as engine:
        report = await examine(engine.url)
    spelled = {row.case: row.cell(CaseColumn.TEXT).grade for row in report.rows}
    assert {case for case, grade in spelled.items() if grade is not Grade.EXACT} == {"reasoning"}, plain(report)
    assert found(report, "chat template").grade is Grade.UNKNOWN


async def test_a_plain_openai_server_is_not_exact(tiny_model: Path) -> None:
    async with FakeEngine(plain=True) as engine:
        report = await examined(engine, tiny_model)
    assert not report.is_exact
    assert "replies lack token ids" in found(report, "engine").what
    assert "encoded again from text" in found(report, "single turn, ids").what


async def test_closed_routes_are_warnings_that_say_which_flag() -> None:
    async with FakeEngine(scale_out=False, version="0.31.0") as engine:
        report = await examine(engine.url)
    assert "--enable-scale-out" in found(report, "generate").remedy
    assert found(report, "bridge, prefix").grade is Grade.EXACT
    assert report.is_exact, plain(report)


async def test_another_version_is_a_note_and_an_engine_that_takes_no_ids_is_exact_but_joins_no_turns() -> None:
    async with FakeEngine(takes_prompt_ids=False, version="0.99.0") as engine:
        report = await examine(engine.url)
    assert found(report, "engine").grade is Grade.OK
    assert "Stepwell's tests use 0.32" in found(report, "engine").what
    assert "no_renderer" in found(report, "bridge, prefix").what
    assert [line.partition(":")[0] for line in report.missing] == ["turns do not join"]
    assert report.is_exact, plain(report)


async def test_a_paused_engine_gets_no_calls() -> None:
    async with FakeEngine() as engine:
        engine.pause()
        report = await examine(engine.url)
    assert "is paused" in found(report, "pause").what
    assert not report.rows
    assert not report.is_exact


async def test_an_unreachable_engine_is_one_fault() -> None:
    report = await examine(f"http://127.0.0.1:{free_port()}")
    assert found(report, "engine").grade is Grade.FAULT
    assert "is it up" in found(report, "engine").remedy
    assert not report.rows


async def test_a_missing_tokenizer_is_a_fault(tmp_path: Path) -> None:
    async with FakeEngine() as engine:
        report = await examine(engine.url, tokenizer_path=str(tmp_path / "none"))
    assert "no tokenizer could be loaded" in found(report, "chat template").what
    assert found(report, "single turn, text").grade is Grade.EXACT
