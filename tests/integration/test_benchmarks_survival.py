"""The survival benchmark's agents and auditor, at a gateway without Ray: they find nothing lost, and notice losses."""

from benchmarks.survival.__main__ import ROWS, chosen_rows
from benchmarks.survival.auditor import Auditor
from benchmarks.survival.load import AgentLoad
from benchmarks.survival.row import RowOutcome
from stepwell.steps.step import Step
from tests.builders import make_step
from tests.rig.fake_engine import FakeEngine
from tests.rig.gateways import serve_gateway
from tests.rig.local_pool import LocalPool


async def test_what_agents_were_answered_is_what_a_trainer_gets(pool: LocalPool, engine: FakeEngine) -> None:
    auditor = Auditor(fetch_timeout=0.1)
    async with serve_gateway(pool, [engine.url]) as url:
        await AgentLoad([url], auditor, pause=0.0, most_calls=3).run(agents=3, rollouts=4)
        await auditor.drain(pool)
    figures = auditor.figures()
    assert (figures["rollouts"], figures["answered_percent"]) == (12, 100.0)
    assert figures["calls"] == auditor.delivered.total() > 12
    names = ("empty_rollouts", "truncated_rollouts", "steps_lost", "steps_twice")
    assert [figures[name] for name in names] == [0, 0, 0, 0]


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


def test_a_row_is_chosen_by_its_name_or_several_by_its_beginning() -> None:
    assert [row.name for row in chosen_rows("head_10s")] == ["head_10s"]
    assert len(chosen_rows("head")) == 4
    assert chosen_rows("") == list(ROWS)
