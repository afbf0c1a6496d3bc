"""Complete trajectories that nobody uses are packed. Nobody notices, except by the memory."""

from typing import Any

import pytest

from rig.builders import EasyPool, make_step, same_step
from stepwell.pool.api.leasing import Unit
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.producing import Registration, RewardGiven, SubmitVerdict
from stepwell.pool.state.records import WORTH_PACKING, Trajectory
from stepwell.pool.state.stored_step import MOST_KINDS
from stepwell.steps.columns import unpack
from stepwell.steps.step import Exactness, Step, VersionSpan, logprobs_array, mask_array

FIELDS: tuple[dict[str, Any], ...] = (
    {},
    {"response_logprobs": logprobs_array([-0.5, -1.0]), "reward": 0.25},
    {"response_mask": mask_array([True, False]), "response_logprobs": None},
    {"version_spans": (VersionSpan(1, 0, 1), VersionSpan(2, 1, 2)), "policy_version": 1},
    {"exactness": Exactness.ENGINE, "model": "m", "finish_reason": "stop", "sampling": {"temperature": 0.5}},
    {"untrainable": "side_call: a title", "extras": {"a": [1, {"b": None}]}, "lineage": {"replied": "x"}},
    {"quarantine": "no_prompt_ids: none"},
)


def steps_of(uid: str, prompt: str) -> list[Step]:
    return [
        make_step(uid, prompt, uid=f"{uid}-{n}", started_at=float(n), prompt_ids=[n, n + 1], **fields)
        for n, fields in enumerate(FIELDS)
    ]


def filled(rollouts: int = 3) -> EasyPool:
    p = EasyPool(Limits())
    for n in range(rollouts):
        p.register(Registration(f"t{n}", "p", group_size=rollouts))
        assert SubmitVerdict.ACCEPTED in p.submit(steps_of(f"t{n}", "p"))
        p.complete(f"t{n}", "p", float(n))
    return p


def pack_all(p: EasyPool) -> list[Trajectory]:
    p.state.pack_at_rest(awake=0)
    return list(p.state.trajectories.values())


def take_all(p: EasyPool) -> list[Step]:
    (steps,) = p.take(1, untrainable=True, min_exactness=Exactness.RETOKENIZED) or [[]]
    return steps


def test_who_only_watches_sees_the_same_and_leaves_them_packed() -> None:
    packed, other = filled(), filled()
    trajectories, uids = pack_all(packed), [("t0", "p"), ("t1", "p"), ("t2", "p")]
    (ours, ours_sizes), (theirs, theirs_sizes) = packed.view.read(uids), other.view.read(uids)
    assert ours_sizes == theirs_sizes
    assert all(map(same_step, unpack(ours, copy=False), unpack(theirs, copy=False)))
    assert packed.view.page(0, 10).snapshots == other.view.page(0, 10).snapshots
    assert all(trajectory.is_packed for trajectory in trajectories)
    assert packed.ingest.reward(RewardGiven(trajectory_uid="t0", prompt_uid="p", value=5.0))
    assert len(packed.view.read(uids)[0]) == len(ours)
    assert packed.view.page(0, 10).snapshots[-1].reward == 5.25, "with that of a step"


def test_a_batch_of_packed_trajectories_is_the_same_batch() -> None:
    packed, other = filled(), filled()
    assert all(trajectory.is_packed for trajectory in pack_all(packed))
    assert not any(trajectory.is_packed for trajectory in other.state.trajectories.values())
    ours, theirs = take_all(packed), take_all(other)
    assert len(ours) == 3 * (len(FIELDS) - 1)
    assert all(map(same_step, ours, theirs))


def test_what_is_given_to_a_packed_trajectory_is_kept() -> None:
    p = filled()
    pack_all(p)
    assert p.ingest.reward(RewardGiven(trajectory_uid="t1", prompt_uid="p", value=0.75, step_index=0))
    assert p.submit([make_step("t1", "p", uid="t1-0")]) == [SubmitVerdict.DUPLICATE]
    assert p.submit([make_step("t1", "p", uid="late", started_at=0.5)]) == [SubmitVerdict.ACCEPTED]
    (trajectory,) = (found for found in pack_all(p) if found.uid == "t1")
    assert trajectory.is_packed
    assert trajectory.steps["t1-0"].reward == 0.75
    assert list(trajectory.steps)[-1] == "late"
    assert not trajectory.is_packed, "it was read"


def test_what_was_used_last_is_not_packed() -> None:
    p = filled()
    pack_all(p)
    assert p.state.trajectories["t1"].is_scored()
    assert p.state.trajectories["t1"].held_steps()
    p.state.pack_at_rest(awake=1)
    assert [found.uid for found in p.state.trajectories.values() if not found.is_packed] == ["t1"]


def test_a_trajectory_that_is_open_or_gone_is_not_packed() -> None:
    p = filled()
    gone = list(p.state.trajectories.values())
    p.register(Registration("open", "q"))
    p.submit([make_step("open", "q", uid="open-0")])
    take_all(p)
    assert [found.is_packed for found in [*gone, *pack_all(p)]] == [False] * 4


def test_a_channel_that_is_consumed_by_steps_is_not_packed() -> None:
    p = filled()
    leased = p.lease(1, unit=Unit.STEPS, untrainable=True)
    assert leased is not None
    assert not any(trajectory.is_packed for trajectory in pack_all(p))
    p.leasing.ack(leased[0])
    assert p.stats().channels["train"].shipped.steps == 1


@pytest.mark.parametrize(("tokens", "is_packed"), [(WORTH_PACKING // 8, True), (WORTH_PACKING, False)])
def test_only_small_steps_are_worth_it(tokens: int, is_packed: bool) -> None:
    p = EasyPool(Limits())
    p.rollout("t", "p", prompt_ids=range(tokens))
    assert [trajectory.is_packed for trajectory in pack_all(p)] == [is_packed]


def test_steps_may_differ_in_everything() -> None:
    p = EasyPool(Limits())
    for n in range(MOST_KINDS + 20):
        p.rollout(f"t{n}", f"p{n}", sampling={"seed": n})
    pack_all(p)
    taken = p.take(MOST_KINDS + 20)
    assert taken is not None
    assert [step.sampling["seed"] for (step,) in taken] == list(range(MOST_KINDS + 20))


def test_nothing_that_a_person_may_have_said_outlives_its_trajectory() -> None:
    """What steps have alike is kept for good, so it may be nothing of theirs."""
    p = EasyPool(Limits())
    said: list[dict[str, Any]] = [{name: {"who": "Ann"}} for name in ("metadata", "extras", "lineage")]
    for n, fields in enumerate(said):
        p.rollout(f"t{n}", f"p{n}", sampling={"top_p": 0.5}, **fields)
    pack_all(p)
    assert p.take(3) is not None
    kept = repr(vars(p.state._packer))
    assert "Ann" not in kept
    assert "top_p" not in kept
    p.rollout("t", "p", sampling={"top_p": 0.5})
    pack_all(p)
    assert "top_p" in repr(vars(p.state._packer)), "these are no one's"
