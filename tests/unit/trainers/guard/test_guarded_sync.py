"""The guard over the real pool and the real weight sync: which engine has which version when, and what is decided."""

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Literal

import pytest
import torch

from rig.waiting import wait_until
from stepwell.commands.policy import promote
from stepwell.engines.vllm_control import VllmControl
from stepwell.errors import BadRequest, PoolUnavailable, SyncFailed
from stepwell.trainers.guard.guard_settings import GuardSettings
from stepwell.trainers.guard.guarded_sync import GuardedSync
from stepwell.trainers.guard.policy_record import VersionStore
from tests.unit.trainers.guard.service import Constant, LoadedEngine, Service
from tests.unit.trainers.scripted_engine import serve
from tests.unit.trainers.training_pool import TrainingPool

GOOD, BAD = [1.0] * 40, [0.0] * 20


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with ExitStack() as stack:
        engines = [stack.enter_context(serve(LoadedEngine())) for _ in range(3)]
        yield Service(engines, tmp_path / "guard")


@pytest.fixture
def guard(service: Service) -> GuardedSync:
    """With version 1 on all engines."""
    guard = service.guard()
    guard.sync(Constant(0.1), 1)
    return guard


def begin_canary(guard: GuardedSync, version: int = 2) -> None:
    guard.sync(Constant(version / 10), version)
    guard.move()
    assert guard.status().phase == "testing"


def test_the_first_version_goes_to_all_engines(service: Service) -> None:
    report = service.guard().sync(Constant(0.1), 1)
    assert (report.version, report.stable, report.candidate, report.restore) == (1, 1, None, None)
    assert service.versions() == ["1", "1", "1"]
    assert service.pool.policy_version == 1
    assert [(d.version, d.action, d.by, d.reason) for d in service.pool.decisions()] == [
        (1, "promote", "guard", "first version")
    ]


def test_a_new_version_goes_to_the_last_engine_and_a_share_of_sessions(service: Service, guard: GuardedSync) -> None:
    report = guard.sync(Constant(0.2), 2)
    assert (report.version, report.stable, report.restore) == (2, 1, None)
    guard.move()
    assert service.versions() == ["1", "1", "2"]
    assert service.weights() == pytest.approx([0.1, 0.1, 0.2])
    canary = service.pool.canary()
    assert canary is not None
    assert (canary.version, canary.engines, canary.share) == (2, (service.engines[2].url,), 0.15)
    assert service.pool.policy_version == 1
    assert service.pool.decisions()[-1].reason == "15% of sessions, no validation"


def test_a_good_version_is_promoted(service: Service, guard: GuardedSync) -> None:
    begin_canary(guard)
    service.reward(1, *GOOD)
    service.reward(2, *GOOD)
    guard.watch()
    assert guard.status().phase == "promoting"
    assert service.versions() == ["1", "1", "2"]
    guard.move()
    assert service.versions() == ["2", "2", "2"]
    assert (service.pool.policy_version, service.pool.canary()) == (2, None)
    assert service.actions() == [(1, "promote"), (2, "canary"), (2, "promote")]
    reason = service.pool.decisions()[-1].reason
    assert re.match(r"not worse by 0.2 \(beta 0.05\): mean reward 1.00 of 40 against 1.00 of 40", reason)
    assert guard.sync(Constant(0.3), 3).restore is None


def test_a_bad_version_is_rolled_back_and_the_trainer_starts_again(service: Service, guard: GuardedSync) -> None:
    begin_canary(guard)
    service.reward(1, *GOOD)
    service.reward(2, *BAD)
    guard.watch()
    assert (service.pool.policy_version, service.pool.canary()) == (1, None), "sessions leave before weights move"
    assert service.versions() == ["1", "1", "2"]
    guard.move()
    assert service.versions() == ["1", "1", "1"]
    assert service.weights()[2] == pytest.approx(0.1)
    assert service.actions()[-1] == (2, "rollback")
    assert "mean reward 0.00 of 20 against 1.00 of 40" in service.pool.decisions()[-1].reason

    report = guard.sync(Constant(0.3), 3)
    assert report.restore is not None
    assert report.restore["weight"].item() == pytest.approx(0.1)
    guard.move()
    assert service.versions() == ["1", "1", "1"], "version 3 comes from version 2"
    assert guard.sync(Constant(0.4), 4).restore is None
    guard.move()
    assert service.versions() == ["1", "1", "4"]


def test_rewards_are_counted_once(service: Service, guard: GuardedSync) -> None:
    service.reward(1, 0.5)
    begin_canary(guard)
    service.reward(1, 0.5, 0.5)
    service.reward(2, 0.5)
    for _ in range(3):
        guard.watch()
    status = guard.status()
    assert (status.stable_rewards, status.canary_rewards, status.comparisons) == (2, 1, 1)
    assert status.canary_mean == status.stable_mean == 0.5


def test_only_the_newest_weights_wait_while_a_canary_is_tested(service: Service, guard: GuardedSync) -> None:
    begin_canary(guard)
    for version in (3, 4, 5):
        guard.sync(Constant(version / 10), version)
        guard.move()
    assert service.versions() == ["1", "1", "2"]
    assert (guard.status().candidate, guard.status().newest) == (2, 5)
    service.reward(1, *GOOD)
    service.reward(2, *GOOD)
    guard.watch()
    guard.move()
    guard.move()
    assert service.versions() == ["2", "2", "5"]
    assert service.weights()[2] == pytest.approx(0.5)
    assert VersionStore(service.folder).versions() == [1, 2, 5]


def test_weights_that_waited_are_not_used_after_a_rollback(service: Service, guard: GuardedSync) -> None:
    begin_canary(guard)
    guard.sync(Constant(0.3), 3)
    service.reward(1, *GOOD)
    service.reward(2, *BAD)
    guard.watch()
    guard.move()
    guard.move()
    assert service.versions() == ["1", "1", "1"]


# -- a canary without evidence -----------------------------------------------------------------------------------------


def test_a_canary_without_evidence_goes_on_after_its_time_with_an_alarm(
    service: Service, guard: GuardedSync, caplog: pytest.LogCaptureFixture
) -> None:
    begin_canary(guard)
    service.reward(1, *[0.0, 1.0] * 6)
    service.reward(2, *[1.0, 0.0, 0.0, 1.0] * 3)
    guard.watch()
    assert guard.status().alarm is None
    service.now += 600.0
    canary = service.pool.canary()
    guard.watch()
    assert (guard.status().phase, service.pool.canary()) == ("testing", canary)
    assert service.actions()[-1] == (2, "overdue")
    alarm = service.pool.decisions()[-1].reason
    assert alarm.startswith("no decision after 10 min: evidence ")
    assert "difference +0.00 in 12 comparisons" in alarm
    assert f"version 2: overdue: {alarm}" in caplog.text
    assert guard.status().alarm == service.pool._run(service.pool.local.policy_status()).alarm == alarm
    assert guard.status().decisions["overdue"] == 1


def test_an_alarm_comes_again_when_the_age_of_the_canary_has_doubled(service: Service, guard: GuardedSync) -> None:
    begin_canary(guard)
    ages = []
    for minutes in range(45):
        known = len(service.actions())
        guard.watch()
        ages += [minutes] * (len(service.actions()) - known)
        service.now += 60.0
    assert ages[0] == 10
    assert all(later - 2 * earlier in (0, 1) for earlier, later in pairwise(ages))
    assert len(ages) == 3
    assert "without comparisons it has no end" in service.pool.decisions()[-1].reason


def test_the_next_process_does_not_repeat_an_alarm(service: Service, guard: GuardedSync) -> None:
    begin_canary(guard)
    service.now += 700.0
    guard.watch()
    again = service.guard()
    again.sync(Constant(0.1), 1)
    again.watch()
    assert service.actions() == [(1, "promote"), (2, "canary"), (2, "overdue")]
    assert again.status().alarm is not None


@pytest.mark.parametrize(("action", "served"), [("promote", "2"), ("rollback", "1")])
def test_an_operator_ends_an_overdue_canary(
    service: Service, guard: GuardedSync, action: Literal["promote", "rollback"], served: str
) -> None:
    begin_canary(guard)
    service.now += 700.0
    guard.watch()
    service.operator(2, action, policy_version=2 if action == "promote" else None)
    guard.watch()
    guard.move()
    assert service.versions() == [served] * 3
    assert guard.status().alarm is None


def test_an_overdue_canary_that_the_pool_has_forgotten_is_set_again(service: Service, guard: GuardedSync) -> None:
    begin_canary(guard)
    service.now += 700.0
    guard.watch()
    state = service.pool.local.transport.services["data_pool"].pool.state
    state.serving = replace(state.serving, canary=None)
    guard.watch()
    assert service.actions()[-1] == (2, "canary")
    assert guard.status().phase == "testing"


# -- the gate ----------------------------------------------------------------------------------------------------------


def scored(mean: float, tasks: int = 100) -> dict[str, float]:
    return {f"task-{number}": float(number < mean * tasks) for number in range(tasks)}


def test_a_version_that_is_worse_in_validation_is_given_to_no_session(service: Service) -> None:
    scores = {1: 0.8, 2: 0.7, 3: 0.76}
    guard = service.guard(validate=lambda model, version: scored(scores[version]))
    guard.sync(Constant(0.1), 1)
    assert guard.sync(Constant(0.2), 2).restore is None
    guard.move()
    assert service.versions() == ["1", "1", "1"]
    refusal = service.pool.decisions()[-1]
    assert (refusal.version, refusal.action) == (2, "refuse")
    assert refusal.reason == "validation is 0.100 ± 0.030 below that of version 1 on the same 100 tasks"
    guard.sync(Constant(0.3), 3)
    guard.move()
    assert service.versions() == ["1", "1", "3"]
    assert service.pool.decisions()[-1].reason == "15% of sessions, validation 0.760"


def test_a_version_is_validated_against_the_stable_one(service: Service) -> None:
    scores = {1: 0.5, 2: 0.9, 3: 0.7}
    guard = service.guard(validate=lambda model, version: scored(scores[version]))
    guard.sync(Constant(0.1), 1)
    begin_canary(guard)
    assert guard.status().validation == 0.5
    service.reward(1, *GOOD)
    service.reward(2, *GOOD)
    guard.watch()
    guard.move()
    assert guard.status().validation == 0.9
    guard.sync(Constant(0.3), 3)
    assert service.actions()[-1] == (3, "refuse")


def test_a_version_is_not_refused_because_the_stable_one_was_lucky_once(service: Service) -> None:
    validated = list[tuple[int, float]]()

    def validate(model: torch.nn.Module, version: int) -> dict[str, float]:
        is_lucky = not validated
        validated.append((version, round(model.weight.item(), 3)))  # type: ignore[operator]
        return scored(0.9 if is_lucky else 0.7)

    guard, model = service.guard(validate=validate), Constant(0.2)
    guard.sync(Constant(0.1), 1)
    guard.sync(model, 2)
    assert validated == [(1, 0.1), (2, 0.2), (1, 0.1)], "the stable weights once more before a refusal"
    assert model.weight.item() == pytest.approx(0.2)
    assert service.actions() == [(1, "promote")]
    assert guard.status().validation == 0.7
    guard.sync(Constant(0.3), 3)
    assert validated[3:] == [(3, 0.3)]


def test_scores_of_validation_outlive_the_process(service: Service) -> None:
    service.guard(validate=lambda model, version: scored(0.8)).sync(Constant(0.1), 1)
    again = service.guard(validate=lambda model, version: {2: scored(0.8)}[version])
    again.sync(Constant(0.2), 2)
    assert service.actions() == [(1, "promote")]


@pytest.mark.parametrize(("wrong", "why"), [(0.7, "by task"), ({"another": 1.0}, "0 tasks with those of version 1")])
def test_scores_that_cannot_be_compared_are_named(service: Service, wrong: object, why: str) -> None:
    guard = service.guard(validate=lambda model, version: scored(0.7) if version == 1 else wrong)
    guard.sync(Constant(0.1), 1)
    with pytest.raises(BadRequest, match=why):
        guard.sync(Constant(0.2), 2)


def test_a_refusal_leaves_the_canary_alone(service: Service) -> None:
    scores = {1: 0.8, 2: 0.8, 3: 0.1}
    guard = service.guard(validate=lambda model, version: scored(scores[version]))
    guard.sync(Constant(0.1), 1)
    begin_canary(guard)
    guard.sync(Constant(0.3), 3)
    canary = service.pool.canary()
    assert canary is not None
    assert (canary.version, guard.status().phase) == (2, "testing")


def test_after_some_refusals_the_trainer_starts_again(service: Service) -> None:
    guard = service.guard(validate=lambda model, version: scored(1.0 / version))
    guard.sync(Constant(0.1), 1)
    restored = [guard.sync(Constant(0.2), version).restore for version in (2, 3, 4)]
    assert [weights is not None for weights in restored] == [False, False, True]
    assert service.actions() == [(1, "promote"), (2, "refuse"), (3, "refuse"), (4, "refuse")]
    assert guard.sync(Constant(0.2), 5).restore is None


def test_without_validation_a_version_passes(service: Service) -> None:
    guard = service.guard(validate=lambda model, version: scored(0.8) if version == 1 else None)
    guard.sync(Constant(0.1), 1)
    begin_canary(guard)


def test_one_engine_has_no_canary_and_one_is_told_at_once(service: Service) -> None:
    service.pool._run(service.pool.local.change_engines(remove=tuple(e.url for e in service.engines[1:])))
    with pytest.raises(BadRequest, match=r"needs 2 or more, and the pool lists 1: .*canary_engines=0"):
        service.guard().sync(Constant(0.1), 1)
    assert service.engines[0].calls == []
    guard = service.guard(settings=GuardSettings(canary_engines=0), validate=lambda model, version: scored(0.5))
    guard.sync(Constant(0.1), 1)
    guard.sync(Constant(0.2), 2)
    guard.move()
    assert service.engines[0].weight_version == "2"
    assert (service.pool.policy_version, service.actions()[-1]) == (2, (2, "promote"))
    assert service.pool.decisions()[-1].reason == "no canary, validation 0.500"


# -- operators ---------------------------------------------------------------------------------------------------------


def test_an_operators_rollback_is_obeyed(service: Service, guard: GuardedSync) -> None:
    begin_canary(guard)
    service.operator(2, "rollback")
    guard.watch()
    guard.move()
    assert service.versions() == ["1", "1", "1"]
    assert service.actions() == [(1, "promote"), (2, "canary"), (2, "rollback")]
    assert guard.status().last_reason == "decided by ada: users complain"
    assert guard.sync(Constant(0.3), 3).restore is not None


def test_an_operators_promotion_is_obeyed(service: Service, guard: GuardedSync) -> None:
    begin_canary(guard)
    service.operator(2, "promote", policy_version=2)
    guard.watch()
    guard.move()
    assert service.versions() == ["2", "2", "2"]
    assert service.actions() == [(1, "promote"), (2, "canary"), (2, "promote")]
    assert guard.status().stable == 2


def test_a_canary_that_got_all_sessions_is_promoted(service: Service, guard: GuardedSync) -> None:
    begin_canary(guard)
    canary = service.pool.canary()
    assert canary is not None
    wider = replace(service.pool.decisions()[-1], by="ada")
    service.pool.decide(wider, replace(canary, share=1.0))
    guard.watch()
    guard.move()
    assert service.versions() == ["2", "2", "2"]
    assert (service.pool.policy_version, service.pool.canary()) == (2, None)


def test_an_operators_rollback_during_the_promotion_is_obeyed(service: Service, guard: GuardedSync) -> None:
    begin_canary(guard)
    service.reward(1, *GOOD)
    service.reward(2, *GOOD)
    guard.watch()
    service.operator(2, "rollback")
    guard.move()
    guard.move()
    assert service.versions() == ["1", "1", "1"]
    assert service.pool.policy_version == 1


# -- engines -----------------------------------------------------------------------------------------------------------


def test_restarted_engines_get_the_version_that_they_belong_to(service: Service, guard: GuardedSync) -> None:
    begin_canary(guard)
    for engine in service.engines:
        engine.restart()
    guard.move()
    assert service.versions() == ["1", "1", "2"]
    assert service.weights() == pytest.approx([0.1, 0.1, 0.2])


def test_a_canary_whose_engine_is_dead_ends_and_is_tried_again_elsewhere(service: Service, guard: GuardedSync) -> None:
    begin_canary(guard)
    service.engines[2].die()
    guard.move()
    assert service.pool.canary() is None
    decision = service.pool.decisions()[-1]
    assert (decision.version, decision.action) == (2, "rollback")
    assert re.match("its engines do not answer for 0 s; it can be tried again", decision.reason)
    guard.move()
    assert service.versions()[:2] == ["1", "2"]
    canary = service.pool.canary()
    assert canary is not None
    assert canary.engines == (service.engines[1].url,)
    assert guard.sync(Constant(0.3), 3).restore is None


def test_a_canary_whose_engine_comes_back_in_time_goes_on(service: Service) -> None:
    guard = service.guard(settings=GuardSettings(engine_timeout=600.0))
    guard.sync(Constant(0.1), 1)
    begin_canary(guard)
    service.engines[2].die()
    guard.move()
    assert guard.status().phase == "testing"
    service.engines[2].restart()
    guard.move()
    assert service.versions() == ["1", "1", "2"]
    assert service.actions() == [(1, "promote"), (2, "canary")]


def test_a_canary_that_cannot_be_placed_is_tried_again(service: Service, guard: GuardedSync) -> None:
    service.engines[2].fails_at = "/collective_rpc"
    guard.sync(Constant(0.2), 2)
    with pytest.raises(SyncFailed, match="told to fail"):
        guard.move()
    assert (guard.status().phase, guard.status().newest, service.pool.canary()) == ("idle", 2, None)
    service.engines[2].fails_at = None
    guard.move()
    assert service.versions() == ["1", "1", "2"]


def test_a_version_waits_while_too_few_engines_answer(service: Service, guard: GuardedSync) -> None:
    for engine in service.engines[1:]:
        engine.die()
    guard.sync(Constant(0.2), 2)
    with pytest.raises(
        SyncFailed, match="version 2 waits: a canary with 1 engines needs 2 that answer, and there are 1"
    ):
        guard.move()
    service.engines[1].restart()
    guard.move()
    assert service.versions()[:2] == ["1", "2"]


def test_a_dead_stable_engine_does_not_stop_a_promotion(service: Service, guard: GuardedSync) -> None:
    begin_canary(guard)
    service.engines[0].fails_at = "/collective_rpc"
    service.reward(1, *GOOD)
    service.reward(2, *GOOD)
    guard.watch()
    with pytest.raises(SyncFailed):
        guard.move()
    assert service.pool.policy_version == 2
    service.engines[0].fails_at = None
    guard.move()
    assert service.versions() == ["2", "2", "2"]


# -- kills -------------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """As if the process were killed there."""


class Mortality:
    """Kills before the n-th call of what it watches, and before none if n is larger than their number."""

    def __init__(self, n: int) -> None:
        self.is_killed = False
        self._left = n

    def watching(self, call: Callable[..., None]) -> Callable[..., None]:
        def dying(*args: object, **options: object) -> None:
            self._left -= 1
            if self._left == 0:
                self.is_killed = True
                raise Killed
            call(*args, **options)

        return dying


def test_a_trainer_that_is_killed_anywhere_goes_on(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every write of the state and every decision is a place to die."""
    for place in range(1, 100):
        base, mortality = 10 * place, Mortality(place)
        with monkeypatch.context() as patch, suppress(Killed):
            patch.setattr(VersionStore, "write_state", mortality.watching(VersionStore.write_state))
            patch.setattr(TrainingPool, "decide", mortality.watching(TrainingPool.decide))
            good_then_bad(service, base)
        good_then_bad(service, base)
        last_action = {version - base: action for version, action in service.actions() if version > base}
        assert (last_action[2], last_action[3]) == ("promote", "rollback")
        assert service.versions() == [str(base + 2)] * 3
        assert service.weights() == pytest.approx([0.2] * 3)
        assert (service.pool.policy_version, service.pool.canary()) == (base + 2, None)
        if not mortality.is_killed:
            assert place > 10
            return
    pytest.fail("there is no end of places to die")


def good_then_bad(service: Service, base: int) -> None:
    """A trainer whose version 2 is good and version 3 is bad. A second call goes on where the first one was killed."""
    guard = service.guard()
    for version in (1, 2, 3):
        guard.sync(Constant(version / 10), base + version)
        for _ in range(3):
            guard.move()
            stable, candidate = guard.status().stable, guard.status().candidate
            if guard.status().phase == "testing" and stable is not None and candidate is not None:
                service.reward(stable, *GOOD)
                service.reward(candidate, *(BAD if candidate == base + 3 else GOOD))
            guard.watch()
        guard.move()


@pytest.mark.parametrize("place", range(1, 6), ids=["pause", "label", "load", "version", "resume"])
def test_an_engine_that_a_killed_trainer_was_changing_gets_its_version_and_serves(
    service: Service, guard: GuardedSync, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    guard.sync(Constant(0.2), 2)
    mortality = Mortality(place)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        for name in ("pause", "set_version", "load_checkpoint", "resume"):
            patch.setattr(VllmControl, name, mortality.watching(getattr(VllmControl, name)))
        guard.move()

    again = service.guard()
    again.sync(Constant(0.2), 2)
    again.move()
    assert service.versions() == ["1", "1", "2"]
    assert service.weights()[2] == pytest.approx(0.2)
    assert [engine.is_paused for engine in service.engines] == [False] * 3


@pytest.mark.parametrize("at", ["testing", "promoting", "waiting"])
def test_the_next_process_continues(service: Service, guard: GuardedSync, at: str) -> None:
    begin_canary(guard)
    service.reward(1, *GOOD[:20])
    service.reward(2, *GOOD[:5])
    guard.watch()
    if at == "waiting":
        guard.sync(Constant(0.3), 3)
    if at == "promoting":
        service.reward(1, *GOOD)
        service.reward(2, *GOOD)
        guard.watch()
    before = guard.status()
    guard.close()

    again = service.guard()
    report = again.sync(Constant(0.1), 1)
    assert report.version == (3 if at == "waiting" else 2), "numbers are not used twice"
    assert report.restore is None
    after = again.status()
    assert (after.phase, after.candidate, after.newest) == (before.phase, before.candidate, before.newest)
    assert (after.comparisons, after.canary_rewards) == (before.comparisons, before.canary_rewards)
    service.engines[2].restart()
    again.move()
    assert service.versions() == (["2"] * 3 if at == "promoting" else ["1", "1", "2"])
    service.reward(1, *GOOD)
    service.reward(2, *GOOD)
    again.watch()
    again.move()
    again.move()
    assert service.versions() == (["2", "2", "3"] if at == "waiting" else ["2"] * 3)


def test_a_restart_is_not_lost_with_the_process(service: Service, guard: GuardedSync) -> None:
    begin_canary(guard)
    service.reward(1, *GOOD)
    service.reward(2, *BAD)
    guard.watch()
    model = Constant(0.3)
    report = service.guard().sync(model, 3)
    assert report.restore is not None
    assert model.weight.item() == pytest.approx(0.3), "the trainer's model is only borrowed"


def test_a_pool_that_has_forgotten_the_canary_is_told_again(service: Service, guard: GuardedSync) -> None:
    begin_canary(guard)
    state = service.pool.local.transport.services["data_pool"].pool.state
    state.serving = replace(state.serving, canary=None)
    guard.watch()
    canary = service.pool.canary()
    assert canary is not None
    assert canary.version == 2
    assert guard.status().phase == "testing"


def test_a_pool_that_is_away_delays_a_decision(service: Service, guard: GuardedSync) -> None:
    begin_canary(guard)
    service.reward(1, *GOOD)
    service.reward(2, *BAD)
    service.pool.local.transport.away = True
    with pytest.raises(PoolUnavailable):
        guard.watch()
    service.pool.local.transport.away = False
    guard.watch()
    assert service.actions()[-1] == (2, "rollback")


def test_threads_do_it_all(service: Service) -> None:
    guard = service.guard(background=True, settings=GuardSettings(interval=0.01))
    guard.sync(Constant(0.1), 1)
    guard.sync(Constant(0.2), 2)
    wait_until(lambda: guard.status().phase == "testing", "the canary")
    service.reward(1, *GOOD)
    service.reward(2, *BAD)
    wait_until(lambda: service.pool.canary() is None, "the rollback")
    wait_until(lambda: service.versions() == ["1", "1", "1"], "the stable weights")
    guard.close()
    assert guard.status().decisions == {"promote": 1, "canary": 1, "rollback": 1}


# -- a folder that was lost --------------------------------------------------------------------------------------------


@pytest.fixture
def robbed(service: Service, guard: GuardedSync) -> GuardedSync:
    """A guard whose folder is gone: version 1 is stable, 2 was rolled back, 3 is a canary."""
    begin_canary(guard, 2)
    service.reward(1, *GOOD)
    service.reward(2, *BAD)
    guard.watch()
    guard.move()
    guard.sync(Constant(0.3), 3)
    begin_canary(guard, 3)
    guard.close()
    shutil.rmtree(service.folder)
    return service.guard()


@pytest.mark.parametrize(
    ("version", "why", "number"),
    [
        (4, "it knows nothing of version 4", 4),
        (2, "version 2: rollback by guard: worse than the stable version", 4),
        (3, "version 3: canary by guard: 15% of sessions", 4),
        (0, "it knows nothing of version 0", 4),
    ],
)
def test_without_its_folder_the_guard_brings_no_unknown_weights_to_engines(
    service: Service, robbed: GuardedSync, version: int, why: str, number: int
) -> None:
    served, canary, decided = service.weights(), service.pool.canary(), service.actions()
    with pytest.raises(BadRequest) as refused:
        robbed.sync(Constant(0.2), version)
    robbed.move()
    assert (service.weights(), service.pool.canary(), service.actions()) == (served, canary, decided)
    assert why in str(refused.value)
    assert f"stepwell policy promote --version {number}" in str(refused.value)


def test_without_its_folder_the_guard_goes_on_from_the_version_that_the_pool_serves(
    service: Service, robbed: GuardedSync
) -> None:
    assert robbed.sync(Constant(0.1), 1).stable == 1
    assert service.weights() == pytest.approx([0.1] * 3)
    assert service.pool.canary() is None


def test_an_operator_allows_the_first_version_of_a_guard_that_has_lost_its_folder(
    service: Service, robbed: GuardedSync
) -> None:
    said = service.pool._run(promote(service.pool.local, "ada", "checked by hand", version=4))
    assert said == "version 4 is allowed: start the trainer, whose guard brings it to all engines"
    assert service.pool.canary() is not None
    assert robbed.sync(Constant(0.4), 4).stable == 4
    assert service.weights() == pytest.approx([0.4] * 3)
    assert (service.pool.policy_version, service.pool.canary()) == (4, None)


def test_a_version_that_the_pool_has_served_long_ago_is_not_brought_back(service: Service, guard: GuardedSync) -> None:
    begin_canary(guard)
    service.reward(1, *GOOD)
    service.reward(2, *GOOD)
    guard.watch()
    guard.move()
    shutil.rmtree(service.folder)
    with pytest.raises(BadRequest, match="version 1 is older than version 2, which the pool serves"):
        service.guard().sync(Constant(0.1), 1)
    assert service.versions() == ["2"] * 3


def test_an_older_folder_does_not_stage_a_version_that_was_rolled_back(service: Service, guard: GuardedSync) -> None:
    older = service.folder.with_name("older")
    shutil.copytree(service.folder, older)
    begin_canary(guard)
    service.reward(1, *GOOD)
    service.reward(2, *BAD)
    guard.watch()
    guard.move()
    service.folder = older
    again = service.guard()
    report = again.sync(Constant(0.2), 2)
    assert report.restore is not None
    assert report.restore["weight"].item() == pytest.approx(0.1)
    again.move()
    assert service.versions() == ["1"] * 3
    assert service.actions()[-1] == (2, "rollback")
    assert again.sync(Constant(0.1), 3).restore is None
    again.move()
    assert service.actions()[-1] == (3, "canary")


def test_an_older_folder_does_not_bring_back_an_older_stable_version(service: Service, guard: GuardedSync) -> None:
    older = service.folder.with_name("older")
    shutil.copytree(service.folder, older)
    begin_canary(guard)
    service.reward(1, *GOOD)
    service.reward(2, *GOOD)
    guard.watch()
    guard.move()
    service.folder = older
    with pytest.raises(BadRequest, match="it ends with version 1, and the pool serves version 2"):
        service.guard().sync(Constant(0.3), 3)
    assert service.versions() == ["2"] * 3
