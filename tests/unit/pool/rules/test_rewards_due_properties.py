"""Random interleavings of what reward workers, producers and trainers do to a pool, restarts included."""

import shutil
from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rig.builders import EasyPool, in_groups, make_step, new_folder
from stepwell.pool.api.plan import Limits, OnRewardFailure
from stepwell.pool.api.producing import RewardGiven
from stepwell.pool.api.scoring import JudgementOutcome
from stepwell.pool.shard.recovery import restore_pool
from stepwell.pool.shard.sqlite_journal import SqliteJournal
from stepwell.pool.state.records import Trajectory
from stepwell.pool.state.reward_queue import GIVEN_UP

ATTEMPTS = 2

prompts = st.integers(0, 3).map("p{}".format)
pick = st.integers(0, 10**6)
values = st.floats(-1, 1).filter(bool)


class ScoringMachine(RuleBasedStateMachine):
    policy: ClassVar[OnRewardFailure] = OnRewardFailure.DROP

    def __init__(self) -> None:
        super().__init__()
        self.folder = new_folder()
        self.limits = Limits(
            require_reward=True, max_queue_size=6, reward_attempts=ATTEMPTS, on_reward_failure=self.policy
        )
        self.pool = self.open()
        self.trajectories: dict[str, str] = {}
        """Prompt by uid."""
        self.given: dict[str, float] = {}
        """The reward each should have."""
        self.failures: dict[str, int] = {}
        """Since the last restart."""
        self.taken: list[tuple[str, str]] = []
        """(uid, lease_uid) of all that workers ever got."""
        self.clock = 0.0

    def open(self) -> EasyPool:
        self.journal = SqliteJournal(self.folder / "pool.sqlite", closed_kept=100)
        pool = EasyPool(self.limits, self.journal)
        assert not restore_pool(pool, self.journal).damaged
        return pool

    def teardown(self) -> None:
        """In the end, had all workers died, everything would be offered that was not given up."""
        left = [t.uid for t in self.unscored() if t.reward_lease != GIVEN_UP]
        self.pool.advance(self.clock + 1000)
        assert [steps[0].trajectory_uid for steps in self.pool.take_unscored()] == left
        self.journal.store.close()
        shutil.rmtree(self.folder)

    def commit(self) -> None:
        self.journal.commit(self.pool.state.snapshot())
        self.pool.state.pack_at_rest(awake=0)

    def unscored(self) -> list[Trajectory]:
        """Complete, and without a reward, oldest first."""
        held = [t for t in self.pool.state.trajectories.values() if t.completed and t.uid not in self.given]
        return sorted(held, key=lambda t: (t.group.age, t.group.seq, t.number))

    @rule(prompt=prompts, reward=st.none() | st.none() | values)
    def rollout(self, prompt: str, reward: float | None) -> None:
        uid = f"t{len(self.trajectories)}"
        self.trajectories[uid] = prompt
        self.pool.rollout(uid, prompt, reward, size=2)
        if reward is not None:
            self.given[uid] = reward
        self.commit()

    @precondition(lambda self: self.trajectories)
    @rule(pick=pick)
    def late_step(self, pick: int) -> None:
        uid = f"t{pick % len(self.trajectories)}"
        self.pool.submit([make_step(uid, self.trajectories[uid], uid=f"late-{pick}", started_at=1)])
        self.commit()

    @precondition(lambda self: self.trajectories)
    @rule(pick=pick, value=values)
    def give_reward(self, pick: int, value: float) -> None:
        uid = f"t{pick % len(self.trajectories)}"
        given = RewardGiven(trajectory_uid=uid, prompt_uid=self.trajectories[uid], value=value)
        if self.pool.ingest.reward(given):
            self.given[uid] = value
        self.commit()

    @rule(count=st.integers(1, 3), seconds=st.integers(1, 20))
    def take(self, count: int, seconds: int) -> None:
        offerable = [t.uid for t in self.unscored() if t.reward_lease is None]
        lease_uid = f"lease-{len(self.taken)}"
        uids = [steps[0].trajectory_uid for steps in self.pool.take_unscored(count, lease_uid, seconds=seconds)]
        assert uids == offerable[:count], "the oldest that no one has"
        self.taken += [(uid, lease_uid) for uid in uids]
        self.commit()

    @precondition(lambda self: self.taken)
    @rule(pick=pick, score=values | st.sampled_from([JudgementOutcome.ERROR, JudgementOutcome.TIMEOUT]))
    def judge(self, pick: int, score: float | JudgementOutcome) -> None:
        uid, lease_uid = self.taken[-1 - pick % len(self.taken)]
        known = self.pool.state.trajectories.get(uid)
        is_open = known is not None and known.reward_lease == lease_uid
        assert self.pool.judge(uid, self.trajectories[uid], score, lease_uid) == is_open
        if is_open and isinstance(score, JudgementOutcome):
            self.failures[uid] = self.failures.get(uid, 0) + 1
            self.check_failed(uid)
        elif is_open:
            assert uid not in self.given, "scored a second time"
            self.given[uid] = float(score)
        assert not self.pool.judge(uid, self.trajectories[uid], score, lease_uid), "a judgement counts once"
        self.commit()

    def check_failed(self, uid: str) -> None:
        is_kept = self.failures[uid] < ATTEMPTS or self.policy is OnRewardFailure.KEEP
        assert (uid in self.pool.state.trajectories) == is_kept

    @rule(count=st.integers(1, 2))
    def train(self, count: int) -> None:
        leased = self.pool.lease(count)
        for group in [] if leased is None else in_groups(leased[1]):
            for uid in {step.trajectory_uid for step in group}:
                rewards = [step.reward for step in group if step.trajectory_uid == uid]
                assert [reward for reward in rewards if reward is not None] == [self.given[uid]]
        if leased is not None:
            self.pool.leasing.ack(leased[0])
        self.commit()

    @rule(seconds=st.integers(1, 30))
    def time_passes(self, seconds: int) -> None:
        self.clock += seconds
        self.pool.advance(self.clock)
        self.commit()

    @rule()
    def killed_and_restarted(self) -> None:
        before, leases = self.pool.stats().scoring, self.pool.leases
        self.journal.store.close()
        self.pool = self.open()
        self.pool.leases = leases
        self.pool.advance(self.clock)
        self.failures.clear()
        after = self.pool.stats().scoring
        assert (after.scored, after.failed, after.late) == (before.scored, before.failed, before.late)
        assert after.waiting == len(self.unscored()), "all that is unscored is offered again"

    @invariant()
    def what_is_unscored_waits_is_with_a_worker_or_rests_and_nothing_else_does(self) -> None:
        stats = self.pool.stats().scoring
        given_up = [t.uid for t in self.unscored() if t.reward_lease == GIVEN_UP]
        assert stats.waiting + stats.under_way + stats.resting + len(given_up) == len(self.unscored())
        assert not given_up or self.policy is OnRewardFailure.KEEP
        assert all(self.failures[uid] >= ATTEMPTS for uid in given_up)

    @invariant()
    def every_reward_is_one_that_was_given(self) -> None:
        for uid, trajectory in self.pool.state.trajectories.items():
            assert trajectory.reward == self.given.get(uid)


class DropsGroups(ScoringMachine):
    policy = OnRewardFailure.DROP_GROUP


class Keeps(ScoringMachine):
    policy = OnRewardFailure.KEEP


for machine in (ScoringMachine, DropsGroups, Keeps):
    machine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)

test_dropping_what_cannot_be_scored = ScoringMachine.TestCase
test_dropping_groups_of_what_cannot_be_scored = DropsGroups.TestCase
test_keeping_what_cannot_be_scored = Keeps.TestCase
