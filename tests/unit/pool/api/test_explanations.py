"""Why a trajectory was not trained, for every state and cause."""

from typing import Any

import pytest

from stepwell.pool.api.plan import Limits
from stepwell.pool.api.staleness import Present
from stepwell.pool.api.watching import DROPPED, TrajectorySnapshot, TrajectoryState, why_not_trained


def why(
    state: TrajectoryState, cause: str = "", *, limits: Limits | None = None, version: int = 7, **fields: Any
) -> str:
    known: dict[str, Any] = {"steps": 1, "oldest_version": 2, **fields}
    summary = TrajectorySnapshot(
        trajectory_uid="t",
        prompt_uid="p",
        channel="train",
        source="",
        shard="data_pool",
        group=1,
        group_size=8,
        state=state,
        cause=cause,
        **known,
    )
    return why_not_trained(summary, limits or Limits(), Present(version, 0.0))


def test_nothing_is_said_of_what_was_trained() -> None:
    assert why(TrajectoryState.TRAINED) == ""


@pytest.mark.parametrize(
    ("said", "state", "cause", "fields"),
    [
        ("Its rollout is still running: it waits to be completed.", TrajectoryState.OPEN, "", {}),
        ("running and has no step yet", TrajectoryState.OPEN, "", {"steps": 0}),
        ("Its group of 8 still waits for other rollouts.", TrajectoryState.WAITING, "rollouts", {}),
        (
            "rollouts, 600 s after the first",
            TrajectoryState.WAITING,
            "rollouts",
            {"limits": Limits(group_deadline=600)},
        ),
        ("It waits for a reward: with require_reward", TrajectoryState.WAITING, "reward", {}),
        ("Its group waits for rewards: with require_reward", TrajectoryState.WAITING, "reward", {"reward": 1.0}),
        ("It is ready and waits for a trainer.", TrajectoryState.READY, "", {}),
        ("A trainer has it and has not acknowledged it yet", TrajectoryState.LEASED, "", {}),
        ("It comes from a slice.", TrajectoryState.LEASED, "", {"remark": "It comes from a slice."}),
        ("Its group is neither evicted nor stale: pinned.", TrajectoryState.READY, "", {"kept": "pinned"}),
        ("its exactness, retokenized, is lower", TrajectoryState.TRAINED, "exactness", {"exactness": "retokenized"}),
        ("its steps are marked untrainable, as greedy", TrajectoryState.TRAINED, "greedy", {}),
        ("rejected by ana: wrong.", TrajectoryState.DROPPED, "rejected", {"note": "by ana: wrong"}),
        ("aborted the rollout", TrajectoryState.DROPPED, "aborted", {}),
        ("without a recorded call", TrajectoryState.DROPPED, "empty", {}),
        ("Its reward counted in its group", TrajectoryState.TRAINED, "no_sound_step", {}),
        ("'train' was cleared", TrajectoryState.DROPPED, "cleared", {}),
        ("'train' was full (10000 groups a shard)", TrajectoryState.DROPPED, "evicted", {}),
        (
            "full (10000 groups or 64 bytes a shard)",
            TrajectoryState.DROPPED,
            "evicted",
            {"limits": Limits(max_bytes=64)},
        ),
        ("deadline of 600 s", TrajectoryState.DROPPED, "deadline", {"limits": Limits(group_deadline=600)}),
        ("in 3 attempts. The last failure: no route", TrajectoryState.DROPPED, "reward_failed", {"note": "no route"}),
        ("in 3 attempts.", TrajectoryState.DROPPED, "reward_failed", {}),
        ("It was dropped: corrupt.", TrajectoryState.DROPPED, "corrupt", {}),
    ],
)
def test_every_state_and_cause_is_told_in_words(
    said: str, state: TrajectoryState, cause: str, fields: dict[str, Any]
) -> None:
    assert said in why(state, cause, **fields)


def test_what_was_dropped_as_stale_says_how_far_behind_it_was() -> None:
    note = "the oldest token was 5 versions behind"
    told = why(TrajectoryState.DROPPED, "stale", note=note, limits=Limits(max_staleness=2))
    assert told == "It was dropped as stale: the oldest token was 5 versions behind, max_staleness is 2."


@pytest.mark.parametrize(("on_stale", "fate"), [("drop", "it is dropped when its turn comes"), ("mask", "are masked")])
def test_what_is_held_and_too_old_by_now_is_told_so(on_stale: str, fate: str) -> None:
    limits = Limits(max_staleness=2, on_stale=on_stale)
    assert "5 versions behind, and max_staleness is 2" in why(TrajectoryState.READY, limits=limits)
    assert fate in why(TrajectoryState.READY, limits=limits)
    assert "behind" not in why(TrajectoryState.READY, limits=limits, version=4)
    assert "behind" not in why(TrajectoryState.READY, limits=Limits(max_staleness=2, on_stale="keep"))


def test_every_cause_there_is_has_its_sentence() -> None:
    causes = {"aborted", "cleared", "deadline", "empty", "evicted", "moved", "rejected", "reward_failed"}
    causes |= {"rolled_back", "stale"}
    assert set(DROPPED) == causes
