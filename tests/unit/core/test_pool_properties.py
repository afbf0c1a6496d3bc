"""Random interleavings of everything that can be done to a pool."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stepwell.core.limits import Limits
from stepwell.core.pool import Ending, Pool, Registration, Verdict
from stepwell.core.step import Step
from tests.builders import make_step

CHANNELS = ("train", "validation")
MAX_GROUPS = 5
SIZE = 2

prompts = st.integers(0, 3).map("p{}".format)
pick = st.integers(0, 10**6)


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(Limits(max_queue_size=MAX_GROUPS))
        self.registered: list[tuple[str, str, str]] = []
        self.accepted: dict[str, Step] = {}
        self.shipped: dict[str, Step] = {}
        self.aborted: set[str] = set()
        self.calls = 0
        self.submitted = 0

    def any_trajectory(self, pick: int) -> tuple[str, str, str]:
        return self.registered[pick % len(self.registered)]

    @rule(prompt=prompts, channel=st.sampled_from(CHANNELS))
    def register(self, prompt: str, channel: str) -> None:
        uid = f"t{len(self.registered)}"
        self.pool.register(Registration(uid, prompt, channel, SIZE))
        self.registered.append((uid, prompt, channel))

    @precondition(lambda self: self.registered)
    @rule(pick=pick)
    def submit(self, pick: int) -> None:
        uid, prompt, _ = self.any_trajectory(pick)
        self.calls += 1
        step = make_step(uid, prompt, uid=f"s{self.calls}", started_at=self.calls)
        known = self.pool.knows(uid, prompt)
        (verdict,) = self.pool.submit([step])
        self.submitted += 1
        assert verdict is (Verdict.ACCEPTED if known else Verdict.LATE)
        if known:
            self.accepted[step.uid] = step

    @precondition(lambda self: self.accepted)
    @rule(pick=pick)
    def submit_again(self, pick: int) -> None:
        step = list(self.accepted.values())[pick % len(self.accepted)]
        (verdict,) = self.pool.submit([step])
        self.submitted += 1
        assert verdict in (Verdict.DUPLICATE, Verdict.LATE)

    @precondition(lambda self: self.registered)
    @rule(pick=pick, reward=st.none() | st.floats(-1, 1))
    def complete(self, pick: int, reward: float | None) -> None:
        uid, prompt, _ = self.any_trajectory(pick)
        self.pool.complete(uid, prompt, reward)

    @precondition(lambda self: self.registered)
    @rule(pick=pick)
    def abort(self, pick: int) -> None:
        uid, prompt, _ = self.any_trajectory(pick)
        if self.pool.abort(uid, prompt) is Ending.ABORTED:
            self.aborted.add(uid)

    @rule(channel=st.sampled_from(CHANNELS), groups=st.integers(1, 2))
    def take(self, channel: str, groups: int) -> None:
        could = self.pool.can_take(groups, channel)
        taken = self.pool.take(groups, channel)
        assert (taken is not None) is could
        for group in taken or []:
            self.check_group(group, channel)
        firsts = [int(group[0].trajectory_uid[1:]) for group in taken or []]
        assert firsts == sorted(firsts), "an older group came after a younger one"

    def check_group(self, group: list[Step], channel: str) -> None:
        trajectories = {step.trajectory_uid for step in group}
        assert len(trajectories) == SIZE
        assert {(uid, group[0].prompt_uid, channel) for uid in trajectories} <= set(self.registered)
        for uid in trajectories:
            steps = [step for step in group if step.trajectory_uid == uid]
            assert [step.step_index for step in steps] == list(range(len(steps)))
            assert [step.is_last for step in steps] == [False] * (len(steps) - 1) + [True]
            assert [step.started_at for step in steps] == sorted(step.started_at for step in steps)
        for step in group:
            assert step.uid in self.accepted, "a step came out that never went in"
            assert step.uid not in self.shipped, "a step came out twice"
            assert step.trajectory_uid not in self.aborted
            self.shipped[step.uid] = step

    @invariant()
    def every_step_is_accounted_for(self) -> None:
        stats = self.pool.stats()
        channels = stats.channels.values()
        accepted = sum(c.accepted.steps for c in channels)
        assert accepted == len(self.accepted)
        assert sum(c.shipped.steps for c in channels) == len(self.shipped)
        assert stats.submitted == self.submitted == accepted + stats.refused.total()
        for channel in channels:
            assert channel.held.steps >= 0

    @invariant()
    def bounds_hold_and_memory_follows_what_is_held(self) -> None:
        stats = self.pool.stats()
        live = self.pool._trajectories
        held = [step for trajectory in live.values() for step in trajectory.steps.values()]
        assert sum(c.held.steps for c in stats.channels.values()) == len(held)
        assert sum(c.held.tokens for c in stats.channels.values()) == sum(step.tokens for step in held)
        assert sum(c.trajectories for c in stats.channels.values()) == len(live)
        assert all(c.groups <= MAX_GROUPS for c in stats.channels.values())


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
test_pool = PoolMachine.TestCase
