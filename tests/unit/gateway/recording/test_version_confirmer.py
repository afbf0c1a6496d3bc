import pytest

from stepwell.engines.replica import EngineReplica
from stepwell.gateway.recording.version_confirmer import BRACKET, VersionConfirmer
from stepwell.steps.step import Step, VersionSpan
from tests.builders import make_step, same_step
from tests.unit.gateway.scripted_engines import ScriptedEngines, make_engine


@pytest.fixture
def engines() -> ScriptedEngines:
    return ScriptedEngines()


@pytest.fixture
def versions(engines: ScriptedEngines) -> VersionConfirmer:
    return VersionConfirmer(engines)


def noted(versions: VersionConfirmer, engine: EngineReplica, uid: str = "a", version: int = 5) -> Step:
    step = make_step(uid=uid, policy_version=version, extras={"kept": 1})
    versions.note(step, engine)
    return step


async def test_a_version_that_is_the_same_before_and_after_is_certain(
    engines: ScriptedEngines, versions: VersionConfirmer
) -> None:
    engines.versions[engines.engine] = 5
    (sealed,) = await versions.seal([noted(versions, engines.engine)])
    assert sealed.version_spans == (VersionSpan(5, 0, 2),)
    assert (sealed.policy_version, sealed.extras) == (5, {"kept": 1})


@pytest.mark.parametrize(("after", "oldest"), [(6, 5), (9, 5), (4, 4)])
async def test_a_version_that_changed_is_a_bracket_and_counts_as_the_older(
    engines: ScriptedEngines, versions: VersionConfirmer, after: int, oldest: int
) -> None:
    engines.versions[engines.engine] = after
    (sealed,) = await versions.seal([noted(versions, engines.engine)])
    assert (sealed.policy_version, sealed.version_spans) == (oldest, ())
    assert sealed.extras == {"kept": 1, BRACKET: [5, after]}


async def test_a_version_that_cannot_be_told_leaves_the_step_as_it_is(
    engines: ScriptedEngines, versions: VersionConfirmer
) -> None:
    step = noted(versions, engines.engine)
    (sealed,) = await versions.seal([step])
    assert same_step(sealed, step)


async def test_an_engine_that_tells_no_versions_is_not_asked(
    engines: ScriptedEngines, versions: VersionConfirmer
) -> None:
    mute = make_engine(weight_versions=False)
    engines.versions[mute] = 9
    step = noted(versions, mute)
    (sealed,) = await versions.seal([step])
    assert same_step(sealed, step)
    assert engines.asked_versions == []


async def test_spans_that_are_known_exactly_are_not_asked_about(
    engines: ScriptedEngines, versions: VersionConfirmer
) -> None:
    engines.versions[engines.engine] = 9
    exact = make_step(uid="a", policy_version=5, version_spans=(VersionSpan(5, 0, 1), VersionSpan(6, 1, 2)))
    versions.note(exact, engines.engine)
    (sealed,) = await versions.seal([exact])
    assert same_step(sealed, exact)


async def test_each_engine_is_asked_once_for_all_its_steps(
    engines: ScriptedEngines, versions: VersionConfirmer
) -> None:
    other = make_engine("http://f")
    engines.versions = {engines.engine: 5, other: 7}
    steps = [noted(versions, engines.engine, "a"), noted(versions, other, "b"), noted(versions, engines.engine, "c")]
    sealed = await versions.seal(steps)
    assert len(engines.asked_versions) == 2
    assert [step.uid for step in sealed] == ["a", "b", "c"]
    assert [bool(step.version_spans) for step in sealed] == [True, False, True]
    assert sealed[1].extras[BRACKET] == [5, 7]


async def test_a_step_that_is_sealed_again_says_the_same(engines: ScriptedEngines, versions: VersionConfirmer) -> None:
    """The pool was away meanwhile, and the weights have changed since."""
    engines.versions[engines.engine] = 5
    step = noted(versions, engines.engine)
    (first,) = await versions.seal([step])
    engines.versions[engines.engine] = 8
    (again,) = await versions.seal([step])
    assert same_step(first, again)


async def test_a_step_whose_fate_is_known_is_forgotten(engines: ScriptedEngines, versions: VersionConfirmer) -> None:
    engines.versions[engines.engine] = 8
    before, after = noted(versions, engines.engine, "a"), noted(versions, engines.engine, "b")
    versions.forget(before)
    await versions.seal([after])
    versions.forget(after)
    for step, sealed in zip((before, after), await versions.seal([before, after]), strict=True):
        assert same_step(step, sealed)
    assert len(engines.asked_versions) == 1
