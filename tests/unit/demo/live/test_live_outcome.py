import json
from pathlib import Path

import pytest
from stepwell.demo.live_outcome import WINDOW, LiveRecord, UserTurn

from stepwell.pool.api.policy import PolicyAction, PolicyDecision
from stepwell.pool.api.watching import TrajectorySnapshot, TrajectoryState

BEGAN = 1_000.0


def decision(version: int, action: PolicyAction, at: float) -> PolicyDecision:
    return PolicyDecision(version, action, "guard", f"{action} it", BEGAN + at)


def snapshot(session: str, oldest: int | None, newest: int | None, started: float = 60.0) -> TrajectorySnapshot:
    return TrajectorySnapshot(
        trajectory_uid=f"{session}-1",
        prompt_uid=session,
        channel="train",
        source="",
        group=1,
        group_size=1,
        state=TrajectoryState.OPEN,
        oldest_version=oldest,
        newest_version=newest,
        started_at=BEGAN + started,
    )


def turns(count: int, *, accepted: bool, since: float) -> list[UserTurn]:
    return [
        UserTurn(at=BEGAN + since + n / count, session=f"{since}-{n % 10}", accepted=accepted) for n in range(count)
    ]


def record(**changes: object) -> LiveRecord:
    known: dict[str, object] = {
        "began_at": BEGAN,
        "turns": [*turns(50, accepted=False, since=20.0), *turns(2 * WINDOW, accepted=True, since=100.0)],
        "decisions": [
            decision(0, "promote", 10.0),
            decision(1, "canary", 30.0),
            decision(1, "promote", 40.0),
            decision(7, "canary", 70.0),
            decision(7, "rollback", 82.5),
        ],
        "snapshots": [snapshot("a", 1, 1), snapshot("b", 6, 7), snapshot("c", 7, 8, 81.0), snapshot("d", None, None)],
        "poisoned": 7,
    }
    return LiveRecord(**(known | changes))  # type: ignore[arg-type]


def outcome_of(record: LiveRecord, path: Path) -> dict[str, object]:
    record.outcome(seed=1, updates=40, seconds=300.0).write(path)
    return dict(json.loads(path.read_text()))


def test_an_outcome_says_how_acceptance_rose(tmp_path: Path) -> None:
    outcome = outcome_of(record(), tmp_path / "outcome.json")

    assert (outcome["task"], outcome["seed"], outcome["updates"]) == ("live", 1, 40)
    assert (outcome["start"], outcome["end"]) == (0.0, 1.0)
    assert outcome["goal_at"] == pytest.approx(100.0 + 160 / 400, abs=0.2)
    assert (outcome["sessions"], outcome["replies"], outcome["failed_calls"]) == (20, 450, {})
    assert outcome["decisions"] == {"canary": 2, "promote": 2, "rollback": 1}


def test_an_outcome_says_what_became_of_the_poisoned_update(tmp_path: Path) -> None:
    assert outcome_of(record(), tmp_path / "outcome.json")["poisoned"] == {
        "version": 7,
        "canary_at": 70.0,
        "rolled_back_at": 82.5,
        "seconds": 12.5,
        "promoted": False,
        "sessions": 2,
        "share": 0.5,
        "reason": "rollback it",
    }


def test_a_session_on_both_sides_of_the_poisoned_version_counts_only_if_it_can_have_met_it() -> None:
    on_both_sides = [snapshot("early", 6, 8, started=60.0), snapshot("late", 6, 8, started=90.0)]
    outcome = record(snapshots=on_both_sides).outcome(seed=0, updates=1, seconds=1.0)

    assert outcome.poisoned is not None
    assert outcome.poisoned.sessions == 1


def test_every_failed_call_is_in_the_outcome_with_its_cause(tmp_path: Path) -> None:
    failed = UserTurn(at=BEGAN + 50.0, session="x", failure="InternalServerError 503 engine_unavailable")
    outcome = outcome_of(record(turns=[failed, failed]), tmp_path / "outcome.json")

    assert outcome["failed_calls"] == {"InternalServerError 503 engine_unavailable": 2}
    assert (outcome["start"], outcome["end"], outcome["goal_at"]) == (None, None, None)


def test_the_text_of_a_good_run() -> None:
    text = record().outcome(seed=0, updates=40, seconds=1.0).text()

    assert "0.000 before, 1.000 after 40 updates" in text
    assert "0.8 was reached after 100 s" in text
    assert "0 failed calls" in text
    assert "version 7 was rolled back after 12.5 s, and served 2 sessions (50.0%)" in text


def test_the_text_of_a_run_in_which_the_poison_got_through() -> None:
    promoted = [decision(7, "canary", 70.0), decision(7, "promote", 80.0)]
    text = record(decisions=promoted).outcome(seed=0, updates=40, seconds=1.0).text()

    assert "version 7 was not rolled back" in text
    assert "no update was poisoned" in record(poisoned=None).outcome(seed=0, updates=40, seconds=1.0).text()


def test_a_run_with_a_rollback_is_drawn(tmp_path: Path) -> None:
    decisions = [
        PolicyDecision(1, "promote", "guard", "", 10.0),
        PolicyDecision(2, "canary", "guard", "", 20.0),
        PolicyDecision(2, "rollback", "guard", "", 30.0),
        PolicyDecision(3, "rollback", "operator", "", 40.0),
    ]
    judged = [UserTurn(at=float(at), session="s", accepted=at > 150) for at in range(300)]
    run = LiveRecord(began_at=0.0, turns=judged, decisions=decisions, snapshots=[], poisoned=2)
    run.write_picture("live, seed 0", tmp_path / "acceptance.png")

    assert (tmp_path / "acceptance.png").read_bytes().startswith(b"\x89PNG")
