"""What people decided, over a restart: rejections, rewards, marks, and the audit trail."""

from typing import Any

from rig.builders import EasyPool, make_step
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.producing import Registration, SubmitVerdict
from stepwell.pool.shard.journal import ShardJournal
from stepwell.pool.slices.curation import Curation, CurationAction, CurationOutcome
from tests.unit.pool.shard.journals import Place, kill, open_pool, rows, save, spoil


def curate(pool: EasyPool, action: CurationAction, uid: str, prompt: str = "p", **fields: Any) -> CurationOutcome:
    return pool.curator.curate(Curation(action=action, trajectory_uid=uid, prompt_uid=prompt, by="ana", **fields))


def restarted(place: Place, pool: EasyPool, journal: ShardJournal, limits: Limits) -> tuple[EasyPool, ShardJournal]:
    save(pool, journal)
    kill(journal)
    leases = pool.leases
    pool, journal, restored = open_pool(place, limits)
    assert not restored.damaged
    pool.leases = leases
    return pool, journal


def test_what_was_rejected_stays_rejected_and_its_group_keeps_its_size(place: Place) -> None:
    limits = Limits(group_size=3)
    pool, journal, _ = open_pool(place, limits)
    for uid in ("a", "b"):
        pool.rollout(uid, "p", size=3)
    curate(pool, CurationAction.REJECT, "a")
    pool, journal = restarted(place, pool, journal, limits)
    assert rows(journal) == {"groups": 1, "trajectories": 1, "steps": 1, "leases": 0}
    assert pool.submit([make_step("a", uid="late")]) == [SubmitVerdict.LATE]
    assert curate(pool, CurationAction.REJECT, "a") is CurationOutcome.UNCHANGED, "the trail tells that it was done"
    pool.register(Registration("b", "p", group_size=3))
    pool.rollout("c", "p", size=3)
    (group,) = pool.take(1) or [[]]
    assert [step.trajectory_uid for step in group] == ["b", "c"]


def test_what_was_rejected_under_lease_goes_when_it_comes_back_after_a_restart(place: Place) -> None:
    limits = Limits(group_size=2)
    pool, journal, _ = open_pool(place, limits)
    for uid in ("a", "b"):
        pool.rollout(uid, "p", size=2)
    leased = pool.lease(1, seconds=100)
    assert leased is not None
    curate(pool, CurationAction.REJECT, "a")
    pool, journal = restarted(place, pool, journal, limits)
    assert pool.lease(1) is None
    pool.advance(200)
    (group,) = pool.take(1) or [[]]
    assert [step.trajectory_uid for step in group] == ["b"]
    assert pool.stats().channels["train"].dropped["rejected"].steps == 1


def test_what_was_rejected_in_the_history_is_not_in_it_after_a_restart(place: Place) -> None:
    limits = Limits(group_size=2, history_size=4)
    pool, journal, _ = open_pool(place, limits)
    for uid in ("a", "b", "c", "d"):
        pool.rollout(uid, "p" if uid in "ab" else "q", size=2)
    pool.take(2)
    for uid, prompt in (("a", "p"), ("c", "q"), ("d", "q")):
        assert curate(pool, CurationAction.REJECT, uid, prompt) is CurationOutcome.DONE
    pool, journal = restarted(place, pool, journal, limits)
    assert rows(journal) == {"groups": 1, "trajectories": 1, "steps": 1, "leases": 0}
    (group,) = pool.take(1, history=1.0) or [[]]
    assert [step.trajectory_uid for step in group] == ["b"]


def test_rewards_and_marks_survive_wherever_the_trajectory_is(place: Place) -> None:
    limits = Limits(history_size=4)
    pool, journal, _ = open_pool(place, limits)
    for uid in ("trained", "leased", "queued"):
        pool.register(Registration(uid, uid))
        pool.submit([make_step(uid, uid, uid=uid, reward=0.5)])
        pool.complete(uid, uid)
    pool.take(1)
    leased = pool.lease(1, seconds=100)
    assert leased is not None
    for n, uid in enumerate(("trained", "leased", "queued")):
        assert curate(pool, CurationAction.RELABEL, uid, uid, reward=float(n)) is CurationOutcome.DONE
        assert curate(pool, CurationAction.MARK, uid, uid, mark="odd") is CurationOutcome.DONE
    pool, journal = restarted(place, pool, journal, limits)
    pool.leasing.nack(leased[0])
    fresh = [group[0] for group in pool.take(2) or []]
    (old,) = next(group for group in pool.take(3, history=1.0) or [] if group[0].trajectory_uid == "trained")
    assert {step.trajectory_uid: step.reward for step in [*fresh, old]} == {"trained": 0, "leased": 1, "queued": 2}
    assert all(step.metadata["marks"] == ["odd"] for step in [*fresh, old])
    assert {step.reward_source for step in [*fresh, old]} == {"curation:ana"}


def test_the_audit_trail_is_kept_and_goes_on(place: Place) -> None:
    pool, journal, _ = open_pool(place)
    pool.advance(12.5)
    pool.rollout("t", "p", 1.0)
    curate(pool, CurationAction.RELABEL, "t", reward=0.5, why="half right")
    before = pool.curator.audit(10)
    pool, journal = restarted(place, pool, journal, Limits())
    assert pool.curator.audit(10) == before
    assert (before[0].at, before[0].by, before[0].why) == (12.5, "ana", "half right")
    curate(pool, CurationAction.REJECT, "t")
    pool, journal = restarted(place, pool, journal, Limits())
    assert [entry.action for entry in pool.curator.audit(10)] == [CurationAction.REJECT, CurationAction.RELABEL]


def test_an_entry_that_cannot_be_read_costs_no_other(place: Place) -> None:
    pool, journal, _ = open_pool(place)
    pool.rollout("t", "p")
    for mark in ("odd", "long", "rude"):
        curate(pool, CurationAction.MARK, "t", mark=mark)
    save(pool, journal)
    spoil(journal, "UPDATE slices SET info = ? WHERE key = '2'", b"spoilt")
    for _ in range(2):
        pool, journal, _ = open_pool(place)
        assert [entry.after for entry in pool.curator.audit(10)] == ["odd, long, rude", "odd"]
        curate(pool, CurationAction.UNMARK, "t", mark="rude")
        assert len(pool.curator.audit(10)) == 3
        kill(journal)


def test_a_damaged_journal_keeps_the_trail(place: Place) -> None:
    pool, journal, _ = open_pool(place)
    pool.rollout("t", "p")
    curate(pool, CurationAction.MARK, "t", mark="odd")
    save(pool, journal)
    spoil(journal, "UPDATE steps SET checksum = ?", 0)
    for _ in range(2):
        pool, journal, _ = open_pool(place)
        assert [entry.after for entry in pool.curator.audit(10)] == ["odd"]
        kill(journal)
