"""An engine is judged by what it does: another version is no reason, and what it lacks is named with its cost."""

import logging
import re
from typing import Any

import pytest

from rig.engine_proxy import CONTROL, RENDERERS, SCALE_OUT, EngineProxy
from rig.fake_engine import FakeEngine
from rig.gateways import free_port
from rig.local_pool import LocalPool
from rig.threads import in_thread
from stepwell.commands.processes import missing_lines
from stepwell.doctor.examination import examine
from stepwell.doctor.findings import as_json, plain
from stepwell.engines.fleet import EngineFleet
from tests.integration.gateway.test_bridge import USER, conversing, made, row_count

LACKING: dict[str, tuple[dict[str, Any], str, str]] = {
    "no renderer": ({"closed": RENDERERS}, "turns do not join: ", "--enable-scale-out"),
    "ids are dropped": ({"drops": ["kv_transfer_params"]}, "turns do not join: ", "drops kv_transfer_params"),
    "no ids": ({"hides": ["prompt_token_ids", "token_ids"]}, "no exact steps: ", "no proxy that drops fields"),
    "no echo": ({"hides": ["prompt_token_ids"]}, "no exact steps: ", "no proxy that drops fields"),
    "no log-probabilities": ({"drops": ["logprobs"]}, "no exact steps: ", "no proxy that drops fields"),
    "no tools": ({"without_tools": True}, "no tools: ", "--enable-auto-tool-choice --tool-call-parser PARSER"),
    "no control": ({"closed": CONTROL}, "no weight sync: ", "VLLM_SERVER_DEV_MODE=1"),
    "no scale-out": ({"closed": SCALE_OUT}, "no continuation: ", "--enable-scale-out"),
}


@pytest.mark.parametrize("version", ["0.99.0", "0.31.2", "dev"])
async def test_another_version_is_bridged_and_lacks_nothing(
    version: str, pool: LocalPool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "stepwell.gateway")
    async with FakeEngine(version=version) as engine, conversing(engine, pool) as talk:
        for _ in range(3):
            await talk.ask(USER)
        steps = await talk.steps()
    assert made(steps) == ["rendered: first_turn", "bridged", "bridged"]
    assert row_count(steps) == 1
    lines = [(record.levelname, record.getMessage()) for record in caplog.records if version in record.getMessage()]
    assert lines == [("INFO", f"engine {engine.url} is vLLM {version}; Stepwell's tests use 0.32")]


@pytest.mark.parametrize("name", LACKING)
async def test_what_an_engine_lacks_is_named_with_its_cost_in_the_log_and_by_the_doctor(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    taken, cost, remedy = LACKING[name]
    async with FakeEngine() as engine, EngineProxy(engine.url, **taken) as proxy:
        async with EngineFleet([proxy.url]):
            pass
        logged = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        caplog.clear()
        report = await examine(proxy.url)
    (line,) = report.missing
    assert (line.startswith(cost), remedy in line) == (True, True), line
    assert logged == [f"engine {proxy.url}: {line}"]
    assert f"Missing:\n  {line}\n" in plain(report)
    assert as_json(report)["missing"] == [line]


@pytest.mark.parametrize("name", LACKING)
def test_up_says_the_same_line(name: str) -> None:
    taken, cost, remedy = LACKING[name]
    with in_thread(FakeEngine()) as engine, in_thread(EngineProxy(engine.url, **taken)) as proxy:
        ((line, where),) = missing_lines([proxy.url], None).items()
        assert engine.request_count == 0, "only probes"
    assert (line.startswith(cost), remedy in line, where) == (True, True, [proxy.url]), line


def test_up_says_nothing_of_an_engine_that_lacks_nothing_and_says_one_line_for_several_engines() -> None:
    with (
        in_thread(FakeEngine()) as sound,
        in_thread(FakeEngine(scale_out=False)) as one,
        in_thread(FakeEngine(scale_out=False)) as two,
    ):
        lines = missing_lines([sound.url, one.url, two.url], None)
    ((line, where),) = lines.items()
    assert (line.startswith("no continuation: "), where) == (True, [one.url, two.url])


def test_an_engine_that_does_not_answer_is_a_note_for_up_within_its_time_limit() -> None:
    away = f"http://127.0.0.1:{free_port()}"
    ((line, where),) = missing_lines([away], None).items()
    assert where == [away]
    assert re.match(
        r"what it lacks is not known \(Cannot connect .*\); `stepwell doctor --engine ADDRESS` examines", line
    )
    with in_thread(FakeEngine()) as engine:
        engine.listens.clear()
        ((line, _),) = missing_lines([engine.url], None, timeout=0.2).items()
    assert line.startswith("what it lacks is not known (no answer within 0.2 s)")


async def test_a_paused_engine_is_asked_for_no_tokens_and_probed_when_it_goes_on() -> None:
    async with FakeEngine(takes_prompt_ids=False) as engine:
        engine.pause()
        async with EngineFleet([engine.url]) as engines:
            (one,) = engines.replicas
            assert (one.state, one.facts.tools) == ("paused", None)
            engine.resume()
            await one.check()
            assert (one.state, one.facts.tools, one.facts.template) == ("healthy", True, "")
