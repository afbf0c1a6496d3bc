"""The survival benchmark's agents and auditor, at a gateway without Ray: they find nothing lost, and notice losses."""

import asyncio
import json
import math
from pathlib import Path

from benchmarks.survival.__main__ import chosen_rows, run_row
from benchmarks.survival.auditor import NOTHING_LOST, Auditor
from benchmarks.survival.load import AgentLoad
from benchmarks.survival.row import RowOutcome
from benchmarks.survival.rows import ROWS
from benchmarks.survival.soak_trainer import read_record
from benchmarks.survival.storm import StormAuditor, full
from rig.builders import make_step
from rig.fake_engine import FakeEngine
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from stepwell.steps.step import Step


async def test_what_agents_were_answered_is_what_a_trainer_gets(pool: LocalPool, engine: FakeEngine) -> None:
    auditor = Auditor(fetch_timeout=0.1)
    training = asyncio.create_task(auditor.follow(pool))
    async with serve_gateway(pool, [engine.url]) as url:
        await AgentLoad([url], auditor, pause=0.0, most_calls=3).run(agents=3, rollouts=4)
        await auditor.drain(pool)
    await training
    figures = auditor.figures()
    assert (figures["rollouts"], figures["answered_percent"]) == (12, 100.0)
    assert figures["calls"] == auditor.delivered.total() > 12
    assert {name: figures[name] for name in NOTHING_LOST} == NOTHING_LOST
    assert 0 < auditor.delivery_p99() < math.inf


def audited(answered: int, *steps: Step) -> dict[str, float]:
    auditor = Auditor()
    for _ in range(answered):
        auditor.note_call("t", True, 0.1)
    auditor.completed.add("t")
    auditor.note_delivered(steps)
    return auditor.figures()


def test_a_lost_a_truncated_and_a_repeated_rollout_are_noticed() -> None:
    first, second = make_step("t", uid="t-0"), make_step("t", uid="t-1")
    assert audited(2)["empty_rollouts"] == 1
    assert audited(2, first)["truncated_rollouts"] == audited(2, first)["steps_lost"] == 1
    assert audited(2, first, second, second)["steps_twice"] == 1


def test_a_figure_beyond_its_goal_is_missed() -> None:
    outcome = RowOutcome({"steps_lost": 1, "answered_percent": 99.0}, {"steps_lost": 0}, {"answered_percent": 100.0})
    assert outcome.missed == ["steps_lost", "answered_percent"]


def test_the_99th_percentile_of_delivery_is_infinite_if_a_completed_rollout_never_arrives() -> None:
    auditor = Auditor(ended_at={"a": 1.0, "b": 1.0}, completed={"a", "b"}, arrived_at={"a": 1.5})
    assert auditor.delivery_p99() == math.inf
    assert auditor.delivery_p99({"a", "never completed"}) == 0.5


def test_a_completion_without_an_answer_counts_with_the_time_that_it_has_taken() -> None:
    auditor = StormAuditor(ended_at={"a": 9.0, "b": 10.0, "c": 14.0, "d": 16.0}, seconds={"a": 8.0, "b": 0.5, "d": 4.0})
    assert auditor.completion_p99(since=10.0, until=15.0, now=20.0) == 6.0
    assert auditor.completion_p99(since=10.0, until=12.0, now=20.0) == 0.5
    assert auditor.completion_p99(since=12.0, until=14.0, now=20.0) == math.inf
    assert auditor.recovered(back=10.0, now=20.0) == 6.0


def test_the_load_of_the_storm_grows_with_the_cores_up_to_ten_thousand_agents() -> None:
    assert [full(cores).agents for cores in (2, 16, 64)] == [1_250, 10_000, 10_000]


def test_rows_are_chosen_by_their_names_or_beginnings() -> None:
    assert [row.name for row in chosen_rows(["head_10s", "stopped"])] == ["head_10s", "stopped_shard"]
    assert len(chosen_rows(["head"])) == 4
    assert chosen_rows([]) == list(ROWS)
    assert chosen_rows(["no such row"]) == []


async def test_a_row_that_fails_counts_as_missed() -> None:
    class Broken:
        name = fault = "broken"

        async def run(self, *, quick: bool) -> RowOutcome:
            raise RuntimeError("as meant by this test")

    assert (await run_row(Broken(), quick=True)).missed == ["failed"]


def test_a_batch_that_a_killed_trainer_has_perhaps_acknowledged_counts_once(tmp_path: Path) -> None:
    file = tmp_path / "trained.jsonl"
    lines = [
        {"batch": "a", "steps": [["s1", "t1", 1]]},
        {"batch": "a", "acknowledged": True},
        {"batch": "b", "steps": [["s2", "t2", 1], ["s3", "t3", 1]]},  # killed here
        {"batch": "c", "steps": [["s3", "t3", 1]]},
        {"batch": "c", "acknowledged": True},
        {"batch": "d", "steps": [["s4", "t4", 1]]},
        {"batch": "d", "acknowledged": False},
    ]
    file.write_text("\n".join(map(json.dumps, lines)) + '\n{"batch": "e", "st')
    record = read_record(file)
    assert [step.uid for step in record.trained] == ["s1", "s3"]
    assert [step.uid for step in record.perhaps] == ["s2"]
    assert record.leases_lost == 1
