"""Single cases of the doctor against a fake engine: the dialects, thinking, and the bridge."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rig.chatml import render_chat
from rig.fake_engine import FakeEngine, Faults
from rig.fake_engine.sampling import Reply
from rig.vocabulary import pieces
from stepwell.doctor.cases import CASES, bridge, reasoning
from stepwell.doctor.findings import CaseColumn, Grade
from stepwell.doctor.local_gateway import HELLO, CaseRunner, open_local_gateway
from stepwell.doctor.replies import MESSAGES, RESPONSES, DecodedText

COLUMNS = (CaseColumn.IDS, CaseColumn.LOGPROBS, CaseColumn.TEXT, CaseColumn.STREAM)


async def spelled(ids: Any) -> DecodedText:
    return DecodedText("".join(pieces(list(ids))))


@asynccontextmanager
async def runner_of(engine: FakeEngine) -> AsyncIterator[CaseRunner]:
    async with open_local_gateway(engine.url, None, None, spelled, None) as gateway:
        yield CaseRunner(gateway, engine.model)


@pytest.mark.parametrize("case", [MESSAGES, RESPONSES])
async def test_a_dialect_is_exact_if_its_prompts_and_answers_are_those_of_chat(case: str) -> None:
    async with FakeEngine() as engine, runner_of(engine) as runner:
        cells = await CASES[case](runner)
        prompts = [engine.rendered(seen.body) for seen in engine.requests if seen.path == "/v1/chat/completions"]
    assert {cells[column].grade for column in COLUMNS} == {Grade.EXACT}, cells
    assert len({tuple(prompt) for prompt in prompts}) == 2, "one of the turn, one of the conversation with a tool"
    assert len(prompts) >= 5


@pytest.mark.parametrize("case", [MESSAGES, RESPONSES])
async def test_an_engine_that_renders_one_conversation_in_two_ways_is_found(case: str) -> None:
    rendered = 0

    def every_other(messages: Any, tools: Any = (), add_generation_prompt: bool = True) -> str:
        nonlocal rendered
        rendered += 1
        return "!" * rendered + render_chat(messages, tools, add_generation_prompt)

    async with FakeEngine(template=every_other) as engine, runner_of(engine) as runner:
        finding = (await CASES[case](runner))[CaseColumn.IDS]
    assert finding.grade is Grade.FAULT
    assert "its prompt differs from that of the same chat at token" in finding.what
    assert finding.remedy


@pytest.mark.parametrize("case", [MESSAGES, RESPONSES])
async def test_an_engine_that_never_repeats_an_answer_is_not_blamed_on_the_dialect(case: str) -> None:
    async with FakeEngine() as engine, runner_of(engine) as runner:
        engine.faults = Faults(ignore_seed=True)
        cells = await CASES[case](runner)
    assert cells[CaseColumn.IDS].grade is Grade.EXACT
    assert "does not repeat" in cells[CaseColumn.STREAM].what


@pytest.mark.parametrize("case", CASES)
async def test_an_engine_that_fails_is_a_finding_in_every_case(case: str) -> None:
    async with FakeEngine() as engine, runner_of(engine) as runner:
        engine.faults = Faults(error_status=500)
        finding = (await CASES[case](runner))[CaseColumn.IDS]
    assert finding.grade is Grade.FAULT
    assert "the fake engine was told to fail" in finding.what
    assert finding.remedy


async def test_thinking_that_is_told_apart_is_in_the_ids() -> None:
    async with FakeEngine(replies=[Reply("9.9", reasoning="hm")] * 3) as engine, runner_of(engine) as runner:
        cells = await reasoning(runner)
    assert {cells[column].grade for column in COLUMNS} == {Grade.EXACT}, cells
    assert cells[CaseColumn.PREFIX].grade is Grade.WARNING, "this template does not show thinking"
    assert "at token 0 of its response" in cells[CaseColumn.PREFIX].what


async def test_thinking_that_nobody_tells_apart_is_a_warning_that_names_the_flag() -> None:
    async with FakeEngine(replies=[Reply("<think>hm</think>9.9")] * 2) as engine, runner_of(engine) as runner:
        finding = (await reasoning(runner))[CaseColumn.TEXT]
    assert finding.grade is Grade.WARNING
    assert "--reasoning-parser" in finding.remedy


async def test_the_second_turn_is_sent_as_ids() -> None:
    async with FakeEngine() as engine, runner_of(engine) as runner:
        cells = await bridge(runner)
        sent = [seen.body for seen in engine.requests if seen.body.get("kv_transfer_params")]
    assert {cells[column].grade for column in (*COLUMNS, CaseColumn.PREFIX)} == {Grade.EXACT}, cells
    assert [body["stream"] for body in sent] == [False, True]


async def test_an_engine_that_ignores_the_ids_is_a_warning_that_says_what_to_do() -> None:
    async with FakeEngine(template=reworded) as engine, runner_of(engine) as runner:
        await runner.ask(messages=[HELLO])
        engine.takes_prompt_ids = False  # it has shown to the probe that it does
        finding = (await bridge(runner))[CaseColumn.PREFIX]
    assert finding.grade is Grade.WARNING
    assert "echo_differs" in finding.what
    assert "kv_transfer_params" in finding.remedy


def reworded(messages: Any, tools: Any = (), add_generation_prompt: bool = True) -> str:
    """Shows every reply in other words than it was written in."""
    changed = [{**said, "content": f" {said['content']}"} if said["role"] == "assistant" else said for said in messages]
    return render_chat(changed, tools, add_generation_prompt)
