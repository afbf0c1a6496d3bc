import pytest

from rig.builders import make_step, same_step
from stepwell.engines.replica import EngineReplica
from stepwell.gateway.recording.step_book import BRACKET, HeldStep, StepBook, confirm_versions, steps_of
from stepwell.steps.step import Step, VersionSpan
from tests.unit.gateway.scripted_engines import ScriptedEngines, make_engine


@pytest.fixture
def engines() -> ScriptedEngines:
    return ScriptedEngines()


def held(step: Step, engine: EngineReplica) -> HeldStep:
    (added,) = StepBook(100, 2**20).add([step], engine)
    return added


def noted(engine: EngineReplica, uid: str = "a", version: int = 5) -> HeldStep:
    return held(make_step(uid=uid, policy_version=version, extras={"kept": 1}), engine)


async def confirm(engines: ScriptedEngines, *message: HeldStep) -> list[Step]:
    await confirm_versions(engines, message)
    return steps_of(message)


async def test_a_version_that_is_the_same_before_and_after_is_certain(engines: ScriptedEngines) -> None:
    engines.versions[engines.engine] = 5
    (confirmed,) = await confirm(engines, noted(engines.engine))
    assert confirmed.version_spans == (VersionSpan(5, 0, 2),)
    assert (confirmed.policy_version, confirmed.extras) == (5, {"kept": 1})


@pytest.mark.parametrize(("after", "oldest"), [(6, 5), (9, 5), (4, 4)])
async def test_a_version_that_changed_is_a_bracket_and_counts_as_the_older(
    engines: ScriptedEngines, after: int, oldest: int
) -> None:
    engines.versions[engines.engine] = after
    (confirmed,) = await confirm(engines, noted(engines.engine))
    assert (confirmed.policy_version, confirmed.version_spans) == (oldest, ())
    assert confirmed.extras == {"kept": 1, BRACKET: [5, after]}


async def test_a_version_that_cannot_be_told_leaves_the_step_as_it_is(engines: ScriptedEngines) -> None:
    step = noted(engines.engine)
    (before,), (confirmed,) = steps_of([step]), await confirm(engines, step)
    assert same_step(confirmed, before)


async def test_an_engine_that_tells_no_versions_is_not_asked(engines: ScriptedEngines) -> None:
    mute = make_engine(weight_versions=False)
    engines.versions[mute] = 9
    step = noted(mute)
    (before,), (confirmed,) = steps_of([step]), await confirm(engines, step)
    assert same_step(confirmed, before)
    assert engines.asked_versions == []


async def test_spans_that_are_known_exactly_are_not_asked_about(engines: ScriptedEngines) -> None:
    engines.versions[engines.engine] = 9
    exact = make_step(uid="a", policy_version=5, version_spans=(VersionSpan(5, 0, 1), VersionSpan(6, 1, 2)))
    (confirmed,) = await confirm(engines, held(exact, engines.engine))
    assert same_step(confirmed, exact)


async def test_each_engine_is_asked_once_for_all_its_steps(engines: ScriptedEngines) -> None:
    other = make_engine("http://f")
    engines.versions = {engines.engine: 5, other: 7}
    steps = [noted(engines.engine, "a"), noted(other, "b"), noted(engines.engine, "c")]
    confirmed = await confirm(engines, *steps)
    assert len(engines.asked_versions) == 2
    assert [step.uid for step in confirmed] == ["a", "b", "c"]
    assert [bool(step.version_spans) for step in confirmed] == [True, False, True]
    assert confirmed[1].extras[BRACKET] == [5, 7]


async def test_a_step_that_is_confirmed_again_says_the_same(engines: ScriptedEngines) -> None:
    """The pool was away meanwhile, and the weights have changed since."""
    engines.versions[engines.engine] = 5
    step = noted(engines.engine)
    (first,) = await confirm(engines, step)
    engines.versions[engines.engine] = 8
    (again,) = await confirm(engines, step)
    assert same_step(first, again)
