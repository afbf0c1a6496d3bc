"""Random interleavings of all that can be done to a pool and its journal, restarts included."""

import contextlib
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from stepwell.steps.trainable import StepFilter

from rig.builders import EasyPool, in_groups, make_step, new_folder
from stepwell.errors import Conflict, PoolFull
from stepwell.pool.api.leasing import (
    BatchRequest,
    ExactFill,
    LeasedGroups,
    Order,
    PreviewItem,
    Settlement,
    ShardPreview,
    Unit,
)
from stepwell.pool.api.plan import Limits, OnDeadline, Overflow
from stepwell.pool.api.producing import Registration, RewardGiven, SubmitVerdict
from stepwell.pool.api.sessions import SESSION, session_metadata
from stepwell.pool.api.watching import TrajectorySnapshot
from stepwell.pool.client.watching import exact_items
from stepwell.pool.shard.recovery import restore_pool
from stepwell.pool.shard.sqlite_journal import SqliteJournal
from stepwell.pool.slices.curation import Curation, CurationAction, CurationOutcome
from stepwell.pool.state.records import A_GROUP, A_STEP, A_TRAJECTORY
from stepwell.steps.step import Exactness, Step

CHANNELS = ("train", "validation")
SIZE = 2

prompts = st.integers(0, 3).map("p{}".format)
pick = st.integers(0, 10**6)
channels = st.sampled_from(CHANNELS)
marks = st.sampled_from((None, "greedy: test", "side_call: test"))
grades = st.sampled_from(Exactness)


def source_of(prompt: str) -> str:
    return {"p0": "maths", "p1": "games"}.get(prompt, "")


def user_of_prompt(prompt: str) -> str:
    return "" if prompt == "p3" else "ann"


class PoolMachine(RuleBasedStateMachine):
    """What is asserted holds under every rule for limits; each subclass has another."""

    limits: ClassVar[Limits] = Limits(max_queue_size=5)
    unit: ClassVar[Unit] = Unit.GROUPS
    order: ClassVar[Order] = Order.OLDEST_READY

    def __init__(self) -> None:
        super().__init__()
        self.folder = new_folder()
        self.pool = self.open()
        self.registered: list[tuple[str, str, str]] = []
        self.sent: dict[str, Step] = {}
        self.accepted: set[str] = set()
        self.acked: set[str] = set()
        self.leases: dict[str, set[str]] = {}
        self.contexts: dict[str, list[int]] = {}
        self.calls = self.quarantined = self.submitted = 0
        self.clock = 0.0
        self.rejected: set[str] = set()
        self.rejected_prompts: set[str] = set()
        self.labels: dict[str, float] = {}
        self.marked: dict[str, str] = {}
        self.position = 0
        self.seen: dict[str, TrajectorySnapshot] = {}

    def open(self) -> EasyPool:
        self.journal = SqliteJournal(self.folder / "pool.sqlite", closed_kept=self.limits.closed_kept)
        pool = EasyPool(self.limits, self.journal)
        restored = restore_pool(pool, self.journal)
        assert not restored.damaged
        return pool

    def teardown(self) -> None:
        self.journal.store.close()
        shutil.rmtree(self.folder)

    def commit(self) -> None:
        self.journal.commit(self.pool.state.snapshot())
        self.pool.state.pack_at_rest(awake=0)

    def any_trajectory(self, pick: int) -> tuple[str, str, str]:
        return self.registered[pick % len(self.registered)]

    # -- producers -----------------------------------------------------------------------------------------------------

    @rule(prompt=prompts, channel=channels)
    def register(self, prompt: str, channel: str) -> None:
        uid = f"t{len(self.registered)}"
        try:
            metadata = {SESSION: session_metadata(uid, user_of_prompt(prompt))}
            self.pool.register(Registration(uid, prompt, channel, SIZE, metadata, source=source_of(prompt)))
        except PoolFull:
            assert self.limits.overflow is Overflow.REFUSE
        except Conflict:
            assert self.unit is Unit.TRAJECTORIES or self.limits.on_deadline is OnDeadline.PARTIAL
        else:
            self.registered.append((uid, prompt, channel))
        self.commit()

    @rule(prompt=prompts, channel=channels, mark=marks, grade=grades, reward=st.none() | st.floats(-1, 1))
    def rollouts(self, prompt: str, channel: str, mark: str | None, grade: Exactness, reward: float | None) -> None:
        """As many whole trajectories as a group has, for chance alone seldom fills one."""
        for _ in range(SIZE):
            number = len(self.registered)
            self.register(prompt, channel)
            if len(self.registered) > number:
                self.submit(pick=number, forget=0, new=[number % 10], bad=False, mark=None, grade=Exactness.ENGINE)
                self.submit(pick=number, forget=0, new=[number % 10], bad=False, mark=mark, grade=grade)
                self.complete(number, reward)

    @precondition(lambda self: self.registered)
    @rule(
        pick=pick,
        forget=st.integers(0, 3),
        new=st.lists(st.integers(0, 9), min_size=1, max_size=3),
        bad=st.booleans(),
        mark=marks,
        grade=grades,
    )
    def submit(self, pick: int, forget: int, new: list[int], bad: bool, mark: str | None, grade: Exactness) -> None:
        """A turn that continues the last one, or rewrites its end."""
        uid, prompt, _ = self.any_trajectory(pick)
        self.calls += 1
        context = self.contexts.get(uid, [1])
        kept = context[: max(1, len(context) - forget)]
        step = make_step(
            uid,
            prompt,
            uid=f"s{self.calls}",
            started_at=self.calls,
            prompt_ids=kept,
            response_ids=new,
            policy_version=max(0, self.pool.policy_version - pick % 3),
            quarantine="bad_logprob: test" if bad and pick % 5 == 0 else None,
            untrainable=mark,
            exactness=grade,
        )
        may_come = self.pool.channel_if_open(uid, prompt) or self.was_in_flight(uid, step.started_at)
        (verdict,) = self.pool.submit([step])
        self.submitted += 1
        if not may_come:
            assert verdict is SubmitVerdict.LATE
        elif verdict is SubmitVerdict.FULL:
            assert self.limits.overflow is Overflow.REFUSE
        elif verdict is SubmitVerdict.TOO_LARGE:
            most = 4 * len(step.prompt_ids) + 9 * len(step.response_ids) + A_STEP
            assert self.pool.state.trajectories[uid].nbytes + most > (self.limits.max_bytes or 0) / 4
        elif step.quarantine:
            assert verdict is SubmitVerdict.QUARANTINED
            self.quarantined += 1
        else:
            assert verdict is SubmitVerdict.ACCEPTED
            self.accepted.add(step.uid)
            self.sent[step.uid] = step
            self.contexts[uid] = [*kept, *new]
        self.commit()

    def was_in_flight(self, uid: str, started_at: float) -> bool:
        """Is the trajectory complete, and does it still take steps of calls that began then?"""
        held = self.pool.state.trajectories.get(uid)
        if held is None or not held.completed or not held.is_at_home:
            return False
        return not held.is_closed_to(started_at, None, self.pool.state.now, self.limits.completion_grace)

    @precondition(lambda self: self.accepted)
    @rule(pick=pick)
    def submit_again(self, pick: int) -> None:
        step = self.sent[sorted(self.accepted)[pick % len(self.accepted)]]
        (verdict,) = self.pool.submit([step])
        self.submitted += 1
        assert verdict in (SubmitVerdict.DUPLICATE, SubmitVerdict.LATE)
        self.commit()

    @precondition(lambda self: self.registered)
    @rule(pick=pick, reward=st.none() | st.floats(-1, 1))
    def complete(self, pick: int, reward: float | None) -> None:
        uid, prompt, _ = self.any_trajectory(pick)
        self.pool.complete(uid, prompt, reward)
        self.commit()

    @precondition(lambda self: self.registered)
    @rule(pick=pick, value=st.floats(-1, 1), step=st.none() | st.integers(0, 2))
    def reward(self, pick: int, value: float, step: int | None) -> None:
        uid, prompt, _ = self.any_trajectory(pick)
        given = RewardGiven(trajectory_uid=uid, prompt_uid=prompt, value=value, source="test", step_index=step)
        with contextlib.suppress(Conflict):  # there is no such step
            self.pool.ingest.reward(given)
        self.commit()

    @precondition(lambda self: self.registered)
    @rule(pick=pick)
    def abort(self, pick: int) -> None:
        uid, prompt, _ = self.any_trajectory(pick)
        self.pool.abort(uid, prompt)
        self.commit()

    # -- people --------------------------------------------------------------------------------------------------------

    def curate(self, pick: int, action: CurationAction, **fields: Any) -> tuple[str, CurationOutcome]:
        uid, prompt, _ = self.any_trajectory(pick)
        curation = Curation(action=action, trajectory_uid=uid, prompt_uid=prompt, by="ana", **fields)
        outcome = self.pool.curator.curate(curation)
        assert outcome is not CurationOutcome.UNKNOWN
        assert self.pool.curator.curate(curation) is (
            CurationOutcome.UNCHANGED if outcome is CurationOutcome.DONE else outcome
        )
        self.commit()
        return uid, outcome

    @precondition(lambda self: self.registered)
    @rule(pick=pick)
    def reject(self, pick: int) -> None:
        uid, outcome = self.curate(pick, CurationAction.REJECT)
        if outcome is CurationOutcome.DONE:
            self.rejected.add(uid)
            self.rejected_prompts.add(self.any_trajectory(pick)[1])

    @precondition(lambda self: self.registered)
    @rule(pick=pick, value=st.floats(-1, 1))
    def relabel(self, pick: int, value: float) -> None:
        uid, outcome = self.curate(pick, CurationAction.RELABEL, reward=value)
        if outcome in (CurationOutcome.DONE, CurationOutcome.UNCHANGED):
            self.labels[uid] = value

    @precondition(lambda self: self.registered)
    @rule(pick=pick, mark=st.sampled_from(("good", "odd")))
    def mark(self, pick: int, mark: str) -> None:
        uid, outcome = self.curate(pick, CurationAction.MARK, mark=mark)
        if outcome is CurationOutcome.DONE:
            self.marked[uid] = mark

    @rule(pages=st.integers(1, 5))
    def watch(self, pages: int) -> None:
        """Whoever follows what changes knows what whoever reads all of it sees."""
        more = True
        while more:
            page = self.pool.view.page(self.position, pages)
            self.position, more = page.position, page.more
            self.seen |= {sketch.trajectory_uid: sketch for sketch in page.snapshots}
        assert self.seen == {sketch.trajectory_uid: sketch for sketch in self.pool.view.page(0, 10**6).snapshots}

    # -- consumers -----------------------------------------------------------------------------------------------------

    @rule(
        channel=channels,
        count=st.integers(1, 2),
        seconds=st.integers(1, 20),
        grade=grades,
        marked=st.booleans(),
    )
    def take(self, channel: str, count: int, seconds: int, grade: Exactness, marked: bool) -> None:
        how: dict[str, Any] = {"unit": self.unit, "order": self.order, "min_exactness": grade, "untrainable": marked}
        request = BatchRequest(count=count, channel=channel, **how)
        known = self.pool.state.channels.get(channel)
        is_indexed = known is not None and known.unit is self.unit
        foreseen = self.foresee(channel, request)
        leased = self.pool.lease(count, channel, seconds=seconds, **how)
        self.commit()
        if is_indexed:
            assert (foreseen.count == count) is (leased is not None)
            assert self.pool.previewer.last_request(channel) == (self.pool.state.now, request)
        if is_indexed and leased is not None:
            self.check_foreseen(foreseen.items, leased[1])
        if leased is not None:
            assert len(leased[1].group_sizes) == count
            self.check_taken(*leased, channel, grade, marked)

    @precondition(lambda self: self.unit is Unit.GROUPS)
    @rule(
        channel=channels,
        count=st.integers(1, 2 * SIZE),
        seconds=st.integers(1, 20),
        grade=grades,
        marked=st.booleans(),
        share=st.floats(0, 1),
    )
    def fill(self, channel: str, count: int, seconds: int, grade: Exactness, marked: bool, share: float) -> None:
        step_filter, shares = StepFilter(grade, marked), {"maths": share}
        request = ExactFill(trajectories=count, channel=channel, shares=shares, lease=seconds, step_filter=step_filter)
        foreseen = self.foresee(channel, request)
        leased = self.pool.fill(count, channel, shares=shares, seconds=seconds, step_filter=step_filter)
        self.commit()
        items = exact_items(foreseen.items, request, self.limits.max_share_per_user)
        assert bool(items) == (leased is not None)
        if leased is not None:
            self.check_foreseen(items, leased[1])
            assert len(set(leased[1].columns.trajectory_uids)) == count
            self.check_taken(*leased, channel, grade, marked)

    @rule(channel=channels)
    def clear(self, channel: str) -> None:
        queued = len(self.pool.state.channels.get(channel, ()))
        assert self.pool.clear(channel) == queued
        assert self.pool.ready_groups(channel).groups == {}
        self.commit()

    def check_taken(self, lease_uid: str, taken: LeasedGroups, channel: str, grade: Exactness, marked: bool) -> None:
        groups = in_groups(taken)
        assert taken.sources == [source_of(group[0].prompt_uid) for group in groups]
        for group in groups:
            self.check_group(group, channel, whole=marked and grade is Exactness.RETOKENIZED)
            self.check_gate(group, lambda step: step.exactness.at_least(grade) and (marked or not step.untrainable))
        self.leases[lease_uid] = {step.uid for group in groups for step in group}
        handed_out = [uid for uids in self.leases.values() for uid in uids]
        assert len(set(handed_out)) == len(handed_out), "a step is under two leases"

    def foresee(self, channel: str, request: BatchRequest | ExactFill) -> ShardPreview:
        """Looking changes nothing."""
        before = self.whole_state()
        foreseen = self.pool.preview(channel, request)
        assert self.whole_state() == before
        return foreseen

    def whole_state(self) -> tuple[Any, ...]:
        return (
            self.pool.stats(),
            self.pool.state.snapshot(),
            self.pool.view.page(0, 10**6),
            dict(self.pool.leasing.last_requests),
        )

    def check_foreseen(self, items: Sequence[PreviewItem], taken: LeasedGroups) -> None:
        groups = in_groups(taken)
        assert [(item.prompt_uid, item.steps, set(item.trajectories)) for item in items] == [
            (group[0].prompt_uid, len(group), {step.trajectory_uid for step in group}) for group in groups
        ]
        returns = {step.trajectory_uid: step.trajectory_return for group in groups for step in group}
        foreseen = [pair for item in items for pair in zip(item.trajectories, item.rewards, strict=True)]
        assert dict(foreseen) == returns
        assert [item.opened_at for item in items] == list(taken.opened_at)
        assert [item.from_history for item in items] == list(taken.from_history)

    def check_group(self, group: list[Step], channel: str, *, whole: bool) -> None:
        trajectories = {step.trajectory_uid for step in group}
        assert {(uid, group[0].prompt_uid, channel) for uid in trajectories} <= set(self.registered)
        assert len(trajectories) <= SIZE
        may_be_partial = self.limits.group_deadline or group[0].prompt_uid in self.rejected_prompts
        assert not whole or self.unit is not Unit.GROUPS or may_be_partial or len(trajectories) == SIZE
        assert not trajectories & self.rejected, "it was rejected"
        for uid in trajectories:
            steps = [step for step in group if step.trajectory_uid == uid]
            indexes = [step.step_index for step in steps]
            assert indexes == sorted(set(indexes))
            if self.unit is not Unit.STEPS:
                assert [step.is_last for step in steps] == [False] * (len(steps) - 1) + [True]
                assert not self.limits.require_reward or steps[0].trajectory_return is not None
                assert uid not in self.labels or sum(step.reward or 0.0 for step in steps) == self.labels[uid]
            assert uid not in self.marked or self.marked[uid] in str(steps[0].metadata["marks"])
        for step in group:
            assert step.uid in self.accepted, "a step came out that never went in"
            assert step.uid not in self.acked, "a step came out after it was acknowledged"
            went_in = self.sent[step.uid]
            assert step.prompt_ids.tolist() == went_in.prompt_ids.tolist()
            assert step.response_ids.tolist() == went_in.response_ids.tolist()
            self.check_staleness(step)

    def check_gate(self, group: list[Step], passes: Callable[[Step], bool]) -> None:
        """All of each trajectory that passes came out, and nothing else."""
        assert all(map(passes, group))
        if self.unit is not Unit.STEPS:
            trajectories = {step.trajectory_uid for step in group}
            sent = {uid for uid, step in self.sent.items() if step.trajectory_uid in trajectories and passes(step)}
            assert {step.uid for step in group} == sent

    def check_staleness(self, step: Step) -> None:
        if self.limits.max_staleness is None:
            return
        lag = self.pool.policy_version - step.policy_version
        if self.limits.on_stale == "drop":
            assert lag <= self.limits.max_staleness
        elif self.limits.on_stale == "mask" and lag > self.limits.max_staleness:
            assert step.response_mask is not None
            assert not step.response_mask.any()

    @precondition(lambda self: self.leases)
    @rule(pick=pick)
    def ack(self, pick: int) -> None:
        lease_uid = sorted(self.leases)[pick % len(self.leases)]
        uids = self.leases.pop(lease_uid) & self.present().keys()
        if self.pool.leasing.ack(lease_uid) is Settlement.DONE:
            self.acked |= uids
        assert self.pool.leasing.ack(lease_uid) is not Settlement.UNKNOWN
        self.commit()

    @precondition(lambda self: self.leases)
    @rule(pick=pick)
    def nack(self, pick: int) -> None:
        lease_uid = sorted(self.leases)[pick % len(self.leases)]
        del self.leases[lease_uid]
        self.pool.leasing.nack(lease_uid)
        self.commit()

    # -- the world -----------------------------------------------------------------------------------------------------

    @rule(seconds=st.integers(1, 15))
    def time_passes(self, seconds: int) -> None:
        self.clock += seconds
        self.pool.advance(self.clock)
        self.leases = {uid: held for uid, held in self.leases.items() if uid in self.pool.state.leases}
        self.commit()

    @rule()
    def new_weights(self) -> None:
        self.pool.policy_version += 1
        self.commit()

    @rule()
    def killed_and_restarted(self) -> None:
        self.pool.advance(self.clock)  # a group past its deadline that lost a rollout waits for the next call only
        self.commit()
        before, leases, held = self.pool.stats(), self.pool.leases, self.held()
        trail = self.pool.curator.audit(10_000)
        backlogs = [self.pool.ready_groups(channel) for channel in CHANNELS]
        self.journal.store.close()
        self.pool = self.open()
        self.pool.leases = leases
        self.pool.advance(self.clock)
        assert self.pool.stats() == before
        assert [self.pool.ready_groups(channel) for channel in CHANNELS] == backlogs
        assert self.held() == held
        assert self.pool.curator.audit(10_000) == trail
        self.position, self.seen = 0, {}

    def held(self) -> dict[str, TrajectorySnapshot]:
        """How everything stands that is not gone; when it last changed is not known after a restart."""
        sketches = self.pool.view.page(0, 10**6).snapshots
        known = self.pool.state.trajectories
        return {
            found.trajectory_uid: found._replace(changed_at=0, position=0)
            for found in sketches
            if found.trajectory_uid in known
        }

    # -- what always holds ---------------------------------------------------------------------------------------------

    def present(self) -> dict[str, Any]:
        """Every step in a queue or under a lease."""
        books = self.pool.state
        groups = [group for channel in books.channels.values() for group in channel.groups.values()]
        leases = self.pool.state.leases.values()
        groups += [group for lease in leases for group in lease.groups]
        return {step.uid: step for group in groups for step in group.held_steps()}

    @invariant()
    def every_step_is_accounted_for(self) -> None:
        stats = self.pool.stats()
        ledgers = [channel.ledger for channel in self.pool.state.channels.values()]
        dropped = sum(tally.steps for ledger in ledgers for tally in ledger.dropped.values())
        left_out = sum(tally.steps for ledger in ledgers for tally in ledger.left_out.values())
        present = self.present()
        assert stats.submitted == self.submitted
        assert self.submitted == len(self.accepted) + self.quarantined + stats.refused.total()
        assert sum(ledger.accepted.steps for ledger in ledgers) == len(self.accepted)
        assert sum(ledger.shipped.steps for ledger in ledgers) == len(self.acked)
        assert sum(ledger.held().steps for ledger in ledgers) == len(present)
        assert sum(ledger.held().tokens for ledger in ledgers) == sum(step.tokens for step in present.values())
        assert len(self.accepted) == len(present) + len(self.acked) + dropped + left_out
        assert not self.acked & set(present)

    @invariant()
    def bounds_are_never_passed_and_memory_follows_what_is_held(self) -> None:
        books = self.pool.state
        for channel in books.channels.values():
            assert len(channel) <= self.limits.max_queue_size
            registered = A_GROUP * len(channel) + A_TRAJECTORY * channel.trajectories
            assert self.limits.max_bytes is None or channel.nbytes - registered <= self.limits.max_bytes
            groups = channel.groups.values()
            held_by_one = [t.nbytes for group in groups for t in group.trajectories.values()]
            assert self.limits.max_bytes is None or max(held_by_one, default=0) <= self.limits.max_bytes / 4
            assert channel.nbytes == sum(group.nbytes for group in groups)
            assert channel.trajectories == sum(len(group.trajectories) for group in groups)
            assert channel.completed == sum(group.completed for group in groups)
        leased = [group for lease in self.pool.state.leases.values() for group in lease.groups]
        groups_held = [g for channel in books.channels.values() for g in channel.groups.values()] + leased
        held = {uid for group in groups_held for uid in group.trajectories}
        assert held == set(books.trajectories)
        assert not held & set(books.closed)

    @invariant()
    def the_shelves_hold_what_is_ready(self) -> None:
        if self.unit is not Unit.GROUPS:
            return
        for name, channel in self.pool.state.channels.items():
            groups = [channel.groups[seq] for _, seq in channel.ready]
            counts = Counter((source_of(group.prompt_uid), group.size) for group in groups)
            on_shelves = self.pool.ready_groups(name).groups
            assert counts == {(source, size): n for source, sizes in on_shelves.items() for size, n in sizes.items()}


A_FEW = 5 * (A_GROUP + A_TRAJECTORY + A_STEP)


class DropsOldest(PoolMachine):
    limits = Limits(max_queue_size=5, max_bytes=A_FEW, max_staleness=1, closed_kept=10**6)


class Refuses(PoolMachine):
    limits = Limits(max_queue_size=3, max_bytes=A_FEW, overflow=Overflow.REFUSE, max_staleness=1, on_stale="mask")


class Strict(PoolMachine):
    order = Order.STRICT


class PartialAtDeadline(PoolMachine):
    limits = Limits(max_queue_size=5, group_deadline=20, min_group_size=1, require_reward=True)


class RefillsAtDeadline(PoolMachine):
    limits = Limits(max_queue_size=5, group_deadline=20, on_deadline=OnDeadline.REFILL, unfinished_reward=None)


class CompletesAtDeadline(PoolMachine):
    limits = Limits(max_queue_size=5, group_deadline=20, on_deadline=OnDeadline.REFILL)


class ByTrajectories(PoolMachine):
    limits = Limits(max_queue_size=4, max_staleness=1)
    unit = Unit.TRAJECTORIES


class ScoredTrajectories(PoolMachine):
    limits = Limits(max_queue_size=4, require_reward=True)
    unit = Unit.TRAJECTORIES


class ScoredSteps(PoolMachine):
    limits = Limits(max_queue_size=4, require_reward=True)
    unit = Unit.STEPS


class LimitedUsers(PoolMachine):
    limits = Limits(max_queue_size=5, max_share_per_user=0.5, max_staleness=1)


class StepsOfLimitedUsers(PoolMachine):
    limits = Limits(max_queue_size=4, max_share_per_user=0.5)
    unit = Unit.STEPS


class BySteps(PoolMachine):
    limits = Limits(max_queue_size=4, max_staleness=1)
    unit = Unit.STEPS


for machine in (
    PoolMachine,
    DropsOldest,
    Refuses,
    Strict,
    PartialAtDeadline,
    RefillsAtDeadline,
    CompletesAtDeadline,
    ByTrajectories,
    BySteps,
    LimitedUsers,
    StepsOfLimitedUsers,
    ScoredTrajectories,
    ScoredSteps,
):
    machine.TestCase.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)

test_by_groups = PoolMachine.TestCase
test_dropping_the_oldest = DropsOldest.TestCase
test_refusing_when_full = Refuses.TestCase
test_in_strict_order = Strict.TestCase
test_partial_groups_at_the_deadline = PartialAtDeadline.TestCase
test_refilled_groups_at_the_deadline = RefillsAtDeadline.TestCase
test_rollouts_completed_at_the_deadline = CompletesAtDeadline.TestCase
test_by_trajectories = ByTrajectories.TestCase
test_by_steps = BySteps.TestCase
test_by_scored_trajectories = ScoredTrajectories.TestCase
test_by_groups_of_limited_users = LimitedUsers.TestCase
test_by_steps_of_limited_users = StepsOfLimitedUsers.TestCase
test_by_scored_steps = ScoredSteps.TestCase
