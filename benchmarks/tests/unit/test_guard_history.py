"""The judge of the row live_kills: what it takes for a contradiction, and what for a step back."""

from pathlib import Path
from typing import Any

from benchmarks.survival.guard_history import GuardHistory, contradictions
from stepwell.pool.api.policy import PolicyAction, PolicyDecision


def decided(*actions: tuple[int, PolicyAction]) -> list[PolicyDecision]:
    return [PolicyDecision(version, action, "guard", "", 0.0) for version, action in actions]


def state(**changes: Any) -> dict[str, Any]:
    counts = {"comparisons": 3, "canary_rewards": 3, "stable_rewards": 9}
    return {"stable": 4, "last": 6, "candidate": 5, "phase": "testing", "began_at": 1.0, "test": counts} | changes


def test_a_version_that_is_tried_again_and_promoted_is_no_contradiction() -> None:
    assert contradictions(decided((1, "promote"), (2, "canary"), (2, "overdue"), (2, "rollback"))) == []
    assert len(contradictions(decided((1, "promote"), (2, "overdue")))) == 1
    tried_again = decided((1, "promote"), (3, "canary"), (3, "rollback"), (3, "canary"), (3, "promote"))
    assert contradictions(tried_again) == []


def test_what_no_guard_may_decide_is_found() -> None:
    assert len(contradictions(decided((1, "promote"), (2, "canary"), (2, "promote"), (2, "promote")))) == 1
    assert len(contradictions(decided((1, "promote"), (2, "canary"), (3, "canary")))) == 1
    assert len(contradictions(decided((1, "promote"), (2, "promote")))) == 1
    assert len(contradictions(decided((1, "promote"), (2, "rollback")))) == 1
    assert len(contradictions(decided((5, "promote"), (2, "canary")))) == 1


def test_a_test_that_is_forgotten_and_a_stable_version_that_falls_are_steps_back(tmp_path: Path) -> None:
    history = GuardHistory(tmp_path)
    for one in (state(), state(test=state()["test"] | {"comparisons": 2}), state(stable=3)):
        history.note(one)
    assert [text.split()[0] for text in history.went_back] == ["comparisons", "stable"]


def test_the_test_of_another_canary_begins_at_zero(tmp_path: Path) -> None:
    history = GuardHistory(tmp_path)
    none = {"comparisons": 0, "canary_rewards": 0, "stable_rewards": 0}
    for one in (state(), state(candidate=6, began_at=2.0, test=none), state(phase="idle", test=none), state(test=none)):
        history.note(one)
    assert history.went_back == []
