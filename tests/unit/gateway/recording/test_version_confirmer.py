import pytest

from rig.builders import make_step, same_step
from stepwell.engines.replica import EngineReplica
from stepwell.gateway.recording.step_book import BRACKET, VersionConfirmer
from stepwell.steps.step import Step, VersionSpan
from tests.unit.gateway.scripted_engines import ScriptedEngines, make_engine


@pytest.fixture
def engines() -> ScriptedEngines:
    return ScriptedEngines()


@pytest.fixture
def confirmer(engines: ScriptedEngines) -> VersionConfirmer:
    return VersionConfirmer(engines)


def noted(confirmer: VersionConfirmer, engine: EngineReplica, uid: str = "a", version: int = 5) -> Step:
    step = make_step(uid=uid, policy_version=version, extras={"kept": 1})
    confirmer.note([step], engine)
    return step


async def test_a_version_that_is_the_same_before_and_after_is_certain(
    engines: ScriptedEngines, confirmer: VersionConfirmer
) -> None:
    engines.versions[engines.engine] = 5
    (confirmed,) = await confirmer.confirm([noted(confirmer, engines.engine)])
    assert confirmed.version_spans == (VersionSpan(5, 0, 2),)
    assert (confirmed.policy_version, confirmed.extras) == (5, {"kept": 1})


@pytest.mark.parametrize(("after", "oldest"), [(6, 5), (9, 5), (4, 4)])
async def test_a_version_that_changed_is_a_bracket_and_counts_as_the_older(
    engines: ScriptedEngines, confirmer: VersionConfirmer, after: int, oldest: int
) -> None:
    engines.versions[engines.engine] = after
    (confirmed,) = await confirmer.confirm([noted(confirmer, engines.engine)])
    assert (confirmed.policy_version, confirmed.version_spans) == (oldest, ())
    assert confirmed.extras == {"kept": 1, BRACKET: [5, after]}


async def test_a_version_that_cannot_be_told_leaves_the_step_as_it_is(
    engines: ScriptedEngines, confirmer: VersionConfirmer
) -> None:
    step = noted(confirmer, engines.engine)
    (confirmed,) = await confirmer.confirm([step])
    assert same_step(confirmed, step)


async def test_an_engine_that_tells_no_versions_is_not_asked(
    engines: ScriptedEngines, confirmer: VersionConfirmer
) -> None:
    mute = make_engine(weight_versions=False)
    engines.versions[mute] = 9
    step = noted(confirmer, mute)
    (confirmed,) = await confirmer.confirm([step])
    assert same_step(confirmed, step)
    assert engines.asked_versions == []


async def test_spans_that_are_known_exactly_are_not_asked_about(
    engines: ScriptedEngines, confirmer: VersionConfirmer
) -> None:
    engines.versions[engines.engine] = 9
    exact = make_step(uid="a", policy_version=5, version_spans=(VersionSpan(5, 0, 1), VersionSpan(6, 1, 2)))
    confirmer.note([exact], engines.engine)
    (confirmed,) = await confirmer.confirm([exact])
    assert same_step(confirmed, exact)


async def test_each_engine_is_asked_once_for_all_its_steps(
    engines: ScriptedEngines, confirmer: VersionConfirmer
) -> None:
    other = make_engine("http://f")
    engines.versions = {engines.engine: 5, other: 7}
    steps = [noted(confirmer, engines.engine, "a"), noted(confirmer, other, "b"), noted(confirmer, engines.engine, "c")]
    confirmed = await confirmer.confirm(steps)
    assert len(engines.asked_versions) == 2
    assert [step.uid for step in confirmed] == ["a", "b", "c"]
    assert [bool(step.version_spans) for step in confirmed] == [True, False, True]
    assert confirmed[1].extras[BRACKET] == [5, 7]


async def test_a_step_that_is_confirmed_again_says_the_same(
    engines: ScriptedEngines, confirmer: VersionConfirmer
) -> None:
    """The pool was away meanwhile, and the weights have changed since."""
    engines.versions[engines.engine] = 5
    step = noted(confirmer, engines.engine)
    (first,) = await confirmer.confirm([step])
    engines.versions[engines.engine] = 8
    (again,) = await confirmer.confirm([step])
    assert same_step(first, again)


async def test_a_step_whose_fate_is_known_is_forgotten(engines: ScriptedEngines, confirmer: VersionConfirmer) -> None:
    engines.versions[engines.engine] = 8
    before, after = noted(confirmer, engines.engine, "a"), noted(confirmer, engines.engine, "b")
    confirmer.discard(before)
    await confirmer.confirm([after])
    confirmer.discard(after)
    for step, confirmed in zip((before, after), await confirmer.confirm([before, after]), strict=True):
        assert same_step(step, confirmed)
    assert len(engines.asked_versions) == 1
