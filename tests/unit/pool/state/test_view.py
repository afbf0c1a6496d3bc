"""What a watcher sees: how trajectories stand, what changed since it last looked, and what they hold."""

from typing import Any

import pytest

from rig.builders import EasyPool, make_step
from stepwell.pool.api.leasing import Unit
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.producing import Registration, RewardGiven
from stepwell.pool.api.scoring import Score
from stepwell.pool.api.watching import TrajectorySnapshot, TrajectoryState
from stepwell.pool.slices.curation import Curation, CurationAction
from stepwell.pool.state.change_log import ChangeLogPage
from stepwell.steps.columns import unpack
from stepwell.steps.step import Exactness, VersionSpan

SIDE_CALL = "side_call: a title"


class Watcher:
    """Follows a pool, and keeps its own list as the dashboard does."""

    def __init__(self, pool: EasyPool) -> None:
        self.pool = pool
        self.position = 0
        self.known: dict[str, TrajectorySnapshot] = {}

    def look(self, limit: int = 1000) -> ChangeLogPage:
        page = self.pool.view.page(self.position, limit)
        self.position = page.position
        self.known |= {sketch.trajectory_uid: sketch for sketch in page.snapshots}
        return page

    def changed(self) -> list[str]:
        return [sketch.trajectory_uid for sketch in self.look().snapshots]

    def states(self) -> dict[str, tuple[str, str]]:
        self.look()
        return {uid: (sketch.state.value, sketch.cause) for uid, sketch in self.known.items()}


def test_a_trajectory_is_followed_through_its_whole_life() -> None:
    pool = EasyPool(Limits(group_size=2))
    watcher = Watcher(pool)
    pool.register(Registration("a", "p"))
    assert watcher.states() == {"a": ("open", "")}
    pool.submit([make_step("a", uid="1")])
    pool.complete("a", "p", 1.0)
    assert watcher.states() == {"a": ("waiting", "rollouts")}
    pool.rollout("b", "p", size=2)
    assert watcher.states() == {"a": ("ready", ""), "b": ("ready", "")}
    leased = pool.lease(1, seconds=10)
    assert leased is not None
    assert watcher.states() == {"a": ("leased", ""), "b": ("leased", "")}
    pool.advance(20)
    assert watcher.states() == {"a": ("ready", ""), "b": ("ready", "")}
    pool.take(1)
    assert watcher.states() == {"a": ("trained", ""), "b": ("trained", "")}


def test_each_look_shows_only_what_changed_since_the_last() -> None:
    pool = EasyPool(Limits())
    watcher = Watcher(pool)
    for uid in ("a", "b", "c"):
        pool.rollout(uid, uid)
    assert watcher.changed() == ["a", "b", "c"]
    assert watcher.changed() == []
    pool.ingest.reward(RewardGiven(trajectory_uid="b", prompt_uid="b", value=0.5))
    assert watcher.changed() == ["b"]
    assert watcher.known["b"].reward == 0.5


def test_a_second_watcher_misses_nothing_that_the_first_has_seen() -> None:
    pool = EasyPool(Limits())
    first, second = Watcher(pool), Watcher(pool)
    pool.rollout("a", "a")
    assert first.changed() == ["a"]
    pool.rollout("b", "b")
    pool.submit([make_step("a", "a", uid="more")])
    assert first.changed() == ["b", "a"]
    assert second.changed() == ["b", "a"]


def test_pages_are_of_the_size_asked_for_and_say_whether_there_is_more() -> None:
    pool = EasyPool(Limits())
    for n in range(5):
        pool.rollout(f"t{n}", f"p{n}")
    watcher = Watcher(pool)
    pages = [watcher.look(limit=2) for _ in range(3)]
    assert [len(page.snapshots) for page in pages] == [2, 2, 1]
    assert [page.more for page in pages] == [True, True, False]
    assert list(watcher.known) == [f"t{n}" for n in range(5)]


def test_what_changes_while_it_is_read_is_seen_as_it_is_then() -> None:
    pool = EasyPool(Limits())
    for n in range(4):
        pool.rollout(f"t{n}", f"p{n}")
    watcher = Watcher(pool)
    watcher.look(limit=2)
    pool.abort("t0", "p0")
    pool.abort("t3", "p3")
    while watcher.look(limit=2).more:
        pass
    assert {uid: sketch.state.value for uid, sketch in watcher.known.items()} == {
        "t0": "dropped",
        "t1": "ready",
        "t2": "ready",
        "t3": "dropped",
    }


def test_memory_follows_what_is_held_and_a_watcher_that_fell_behind_is_told_to_begin_anew() -> None:
    pool = EasyPool(Limits(gone_kept=10))
    watcher = Watcher(pool)
    pool.rollout("held", "held")
    for n in range(3000):
        watcher.look()
        pool.rollout(f"t{n}", f"p{n}")
        pool.abort(f"t{n}", f"p{n}")
    log = pool.state.change_log
    assert len(log._uids) == len(log._positions) < 1100
    assert not pool.state.change_log.misses(watcher.position)
    fresh = Watcher(pool)
    assert fresh.changed() == ["held", *(f"t{n}" for n in range(2990, 3000))]
    for n in range(11):
        pool.rollout(f"u{n}", f"p{n}")
        pool.abort(f"u{n}", f"p{n}")
    assert pool.state.change_log.misses(fresh.position)


def test_a_pool_no_one_watches_keeps_one_position_a_trajectory() -> None:
    pool = EasyPool(Limits())
    pool.register(Registration("t", "p"))
    for n in range(100):
        pool.submit([make_step(uid=str(n), started_at=n)])
    assert len(pool.state.change_log._uids) == 1


def summary(pool: EasyPool) -> Any:
    (sketch,) = pool.view.page(0, 10).snapshots
    return sketch


def test_a_summary_adds_up_what_the_trajectory_holds() -> None:
    pool = EasyPool(Limits())
    pool.advance(100.0)
    pool.register(Registration("t", "p", "validation", 4, {"marks": ["odd"], "task": 1}, source="maths"))
    spans = (VersionSpan(3, 0, 1), VersionSpan(5, 1, 2))
    pool.submit(
        [
            make_step(uid="1", policy_version=4, exactness=Exactness.ENGINE),
            make_step(uid="2", policy_version=3, version_spans=spans, exactness=Exactness.RETOKENIZED),
            make_step(uid="3", policy_version=4, untrainable=SIDE_CALL, exactness=Exactness.SUBMITTED),
            make_step(uid="4", quarantine="bad_logprob: nan"),
        ]
    )
    pool.advance(107.0)
    pool.complete("t", "p", 0.5)
    found = summary(pool)
    assert (found.trajectory_uid, found.prompt_uid, found.channel, found.source) == ("t", "p", "validation", "maths")
    assert (found.shard, found.group, found.group_size, found.state) == ("", 1, 4, TrajectoryState.WAITING)
    assert (found.steps, found.quarantined, found.untrainable) == (4, 1, 1)
    assert (found.tokens, found.response_tokens) == (12, 6)
    assert (found.reward, found.reward_source) == (0.5, "completion")
    assert (found.oldest_version, found.newest_version, found.exactness) == (3, 5, "retokenized")
    assert (found.marks, found.started_at, found.changed_at) == (("odd",), 100.0, 107.0)


def test_the_reward_is_what_a_trainer_gets_of_all_steps_together() -> None:
    pool = EasyPool(Limits(require_reward=True))
    pool.register(Registration("t", "p"))
    pool.submit([make_step(uid=str(n), started_at=n) for n in range(3)])
    pool.complete("t", "p")
    assert pool.take_unscored()
    assert pool.judge("t", "p", Score(1.0, step_rewards=(0.25, 0.5, None)))
    assert summary(pool).reward == 1.0
    assert summary(pool).reward_source == "judge"


def test_what_waits_for_a_reward_says_so() -> None:
    pool = EasyPool(Limits(require_reward=True, group_size=2))
    watcher = Watcher(pool)
    pool.rollout("a", "p", None, size=2)
    pool.rollout("b", "p", 1.0, size=2)
    assert watcher.states() == {"a": ("waiting", "reward"), "b": ("waiting", "reward")}
    pool.ingest.reward(RewardGiven(trajectory_uid="a", prompt_uid="p", value=1.0))
    assert watcher.states() == {"a": ("ready", ""), "b": ("ready", "")}


def test_single_trajectories_are_ready_before_their_group_is() -> None:
    pool = EasyPool(Limits(group_size=2))
    watcher = Watcher(pool)
    pool.rollout("a", "p", size=2)
    assert watcher.states() == {"a": ("waiting", "rollouts")}
    pool.rollout("c", "q", size=2)
    leased = pool.lease(1, unit=Unit.TRAJECTORIES)
    assert leased is not None
    assert watcher.states() == {"a": ("leased", ""), "c": ("ready", "")}


def test_single_steps_under_lease_show_in_their_trajectory() -> None:
    pool = EasyPool(Limits())
    watcher = Watcher(pool)
    pool.register(Registration("t", "p"))
    pool.submit([make_step(uid="1")])
    leased = pool.lease(1, unit=Unit.STEPS)
    assert leased is not None
    assert watcher.states() == {"t": ("leased", "")}
    pool.leasing.ack(leased[0])
    assert watcher.states() == {"t": ("open", "")}
    pool.complete("t", "p")
    assert watcher.states() == {"t": ("trained", "")}


@pytest.mark.parametrize(
    ("limits", "cause"),
    [
        (Limits(max_queue_size=1), "evicted"),
        (Limits(max_staleness=1), "stale"),
        (Limits(group_deadline=10, group_size=2, min_group_size=2), "deadline"),
    ],
)
def test_what_is_dropped_says_by_which_cause(limits: Limits, cause: str) -> None:
    pool = EasyPool(limits)
    pool.rollout("t", "p", size=limits.group_size)
    if cause == "evicted":
        pool.register(Registration("u", "q"))
    pool.policy_version = 3
    pool.advance(100)
    pool.take(1)
    sketch = next(found for found in pool.view.page(0, 10).snapshots if found.trajectory_uid == "t")
    assert (sketch.state, sketch.cause) == (TrajectoryState.DROPPED, cause)
    assert cause != "stale" or sketch.note == "the oldest token was 3 versions behind"


def test_what_the_trainer_left_out_altogether_says_why() -> None:
    pool = EasyPool(Limits(group_size=2))
    pool.rollout("kept", "p", size=2)
    pool.rollout("left", "p", size=2, untrainable=SIDE_CALL)
    pool.take(1)
    assert Watcher(pool).states() == {"kept": ("trained", ""), "left": ("trained", "side_call")}


def test_steps_are_read_wherever_they_are_held_and_nothing_of_what_has_left() -> None:
    pool = EasyPool(Limits(history_size=1))
    for uid in ("gone", "history", "leased", "held"):
        pool.rollout(uid, uid)
    pool.take(2)
    pool.lease(1)
    uids = [(uid, uid) for uid in ("held", "gone", "leased", "history", "unknown")]
    columns, sizes = pool.view.read([*uids, ("held", "other prompt")])
    assert sizes == [1, 0, 1, 1, 0, 0]
    assert columns.trajectory_uids == ["held", "leased", "history"]
    assert len(pool.view.read([])[0]) == 0
    assert pool.take(1) is not None, "reading takes nothing"


def test_quarantined_steps_are_read_in_their_place_while_they_are_kept() -> None:
    pool = EasyPool(Limits())
    pool.register(Registration("t", "p"))
    bad = {1: "bad_logprob: nan"}
    pool.submit([make_step(uid=str(n), started_at=n, response_ids=[n], quarantine=bad.get(n)) for n in range(3)])
    steps = unpack(pool.view.read([("t", "p")])[0], copy=False)
    assert [(step.step_index, step.response_ids.tolist(), step.quarantine) for step in steps] == [
        (0, [0], None),
        (1, [1], "bad_logprob: nan"),
        (2, [2], None),
    ]


def test_a_curated_trajectory_in_the_history_is_told_anew() -> None:
    pool = EasyPool(Limits(history_size=5))
    watcher = Watcher(pool)
    pool.rollout("t", "p")
    pool.take(1)
    watcher.look()
    pool.curator.curate(Curation(action=CurationAction.MARK, trajectory_uid="t", prompt_uid="p", by="ana", mark="odd"))
    assert watcher.changed() == ["t"]
    assert (watcher.known["t"].state, watcher.known["t"].marks) == (TrajectoryState.TRAINED, ("odd",))
