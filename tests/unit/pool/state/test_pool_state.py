"""Every operation of PoolState in random order, compared after each with a slow computation from the records alone."""

import inspect
import itertools
import re
import shutil
from collections import Counter
from dataclasses import replace
from math import inf
from typing import Any, ClassVar, get_args

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from stepwell.pool.state.queues import LARGE, ProducerShares
from stepwell.steps.trainable import NOT_CONTINUED, UNSEEN, StepFilter, fault_kind

from rig.builders import make_step, new_folder
from stepwell.errors import BadRequest
from stepwell.pool.api.leasing import Settlement, Unit
from stepwell.pool.api.plan import Layout, Limits
from stepwell.pool.api.policy import Canary, PolicyAction, PolicyDecision
from stepwell.pool.api.producing import CallBegun, Repeats
from stepwell.pool.api.scoring import JudgementOutcome
from stepwell.pool.api.sessions import session_id_of, session_prompt_uid
from stepwell.pool.api.watching import TrajectorySnapshot, TrajectoryState
from stepwell.pool.shard.journal import GROUP_FIELDS, OWN_NAMES, TRAJECTORY_FIELDS
from stepwell.pool.shard.recovery import JournalReader
from stepwell.pool.shard.sqlite_journal import SqliteJournal
from stepwell.pool.slices.all import SLICES
from stepwell.pool.slices.curation import AuditEntry, AuditTrail, CurationAction, CurationOutcome
from stepwell.pool.slices.forgetting import Removal, note_overdue
from stepwell.pool.state.call_operations import A_CALL_IS_MISSING, LATE, MOST_EARLY, RANKS, TOO_MANY
from stepwell.pool.state.change_log import note_of, snapshot_of, standing_of
from stepwell.pool.state.journal import StateJournal
from stepwell.pool.state.ledger import count_steps
from stepwell.pool.state.pool_state import PoolState
from stepwell.pool.state.records import (
    A_GROUP,
    A_PACKED_STEP,
    A_STEP,
    A_TRAJECTORY,
    Group,
    Lease,
    Trajectory,
    json_bytes,
)
from stepwell.pool.state.reward_queue import GIVEN_UP
from stepwell.pool.state.stored_step import PackedSteps, StoredStep
from stepwell.pool.state.tombstones import Tombstone
from stepwell.pool.state.view import PoolView
from stepwell.steps.columns import pack, unpack
from stepwell.steps.step import Exactness, Json

READS = {
    *("channels", "channel_of", "holds", "expired_lease", "oldest_unscored", "has_reward_lease"),
    *("under_reward_lease", "being_scored", "stats", "snapshot", "last_snapshot"),
    *("slice_of", "why_kept", "remark_on", "present"),
}
GONE = (TrajectoryState.TRAINED, TrajectoryState.DROPPED)

pick = st.integers(0, 10**6)
names = st.sampled_from(("train", "validation"))
values = st.floats(-1, 1)
gateway_names = st.sampled_from(("a", "b"))


class StateMachine(RuleBasedStateMachine):
    limits: ClassVar[Limits] = Limits(group_deadline=30, history_size=2)
    unit: ClassVar[Unit] = Unit.GROUPS
    by_step = False

    def __init__(self) -> None:
        super().__init__()
        self.folder = new_folder()
        self.journal = SqliteJournal(self.folder / "pool.sqlite", closed_kept=self.limits.closed_kept)
        self.state = PoolState(self.limits, self.journal, SLICES)
        self.numbers = itertools.count()
        self.groups: set[Group] = set()
        """All that were ever opened."""
        self.empty: set[Group] = set()
        """Those that wait for trajectories and have none."""
        self.submitted: Counter[str] = Counter()
        self.early: dict[str, str] = {}
        """Marked steps that are still to come, with their trajectories."""
        self.rewarded: set[tuple[str, str]] = set()
        """Trajectories and steps that were ever seen with a reward: the trajectory's uid, and the step's identity."""
        self.rewards_read: Counter[str] = Counter()
        """By channel."""
        self.position = 0
        self.seen: dict[str, TrajectorySnapshot] = {}

    def teardown(self) -> None:
        self.journal.store.close()
        shutil.rmtree(self.folder)

    # -- what there is to choose from ----------------------------------------------------------------------------------

    def queued(self) -> list[Group]:
        held = (g for g in self.groups if g.lease is None and not g.trained and (g.trajectories or g in self.empty))
        return sorted(held, key=lambda group: group.seq)

    def at_home(self, *, completed: bool | None = None) -> list[Trajectory]:
        found = (trajectory for group in self.queued() for trajectory in group.trajectories.values())
        return [trajectory for trajectory in found if completed in (None, trajectory.completed)]

    def any_at_home(self, pick: int, *, completed: bool | None = None) -> Trajectory | None:
        found = self.at_home(completed=completed)
        return found[pick % len(found)] if found else None

    def ready_groups(self) -> list[Group]:
        return [group for group in self.queued() if self.is_ready(group)]

    def is_ready(self, group: Group) -> bool:
        return group.is_ready(require_reward=self.limits.require_reward)

    def leased(self) -> list[Trajectory]:
        return [t for lease in self.state.leases.values() for g in lease.groups for t in g.trajectories.values()]

    def new_uid(self, kind: str) -> str:
        return f"{kind}{next(self.numbers)}"

    # -- the pool ------------------------------------------------------------------------------------------------------

    @rule(seconds=st.integers(1, 9))
    def advance(self, seconds: int) -> None:
        self.state.advance(self.state.now + seconds, self.state.pool_time + seconds)

    @rule()
    def set_policy_version(self) -> None:
        self.state.set_policy_version(self.state.policy_version + 1)

    @rule(channel=st.sampled_from(["train", "other"]), version=st.integers(1, 9))
    def set_adapter(self, channel: str, version: int) -> None:
        was_paused = self.state.serving.channel(channel).paused
        self.state.set_adapter(channel, f"{channel}-v{version}", version)
        policy = self.state.serving.channel(channel)
        assert (policy.adapter, policy.version, policy.paused) == (f"{channel}-v{version}", version, was_paused)

    @rule(channel=st.sampled_from(["train", "other"]), paused=st.booleans())
    def pause_channel(self, channel: str, paused: bool) -> None:
        before = self.state.serving.channel(channel)
        self.state.pause_channel(channel, paused=paused)
        assert self.state.serving.channel(channel) == replace(before, paused=paused)

    @rule(action=st.sampled_from(get_args(PolicyAction)), share=st.none() | st.floats(0, 1), withdraw=st.booleans())
    def decide_policy(self, action: PolicyAction, share: float | None, withdraw: bool) -> None:
        version = self.state.policy_version + 1
        canary = None if share is None else Canary(version, ("a:1",), share, self.state.now)
        decision = PolicyDecision(version, action, "guard", "why", at=next(self.numbers))
        self.state.decide_policy(decision, canary, version if action == "promote" else None)
        assert self.state.serving.canary == canary
        assert (version in self.state.serving.withdrawn) == (action in ("refuse", "rollback"))
        if withdraw:
            self.state.set_policy_version(version, (*self.state.serving.withdrawn, 10**6 + version))

    @rule(add=st.sampled_from(((), ("a:1",), ("b:2",))), remove=st.sampled_from(((), ("a:1",))))
    def change_engines(self, add: tuple[str, ...], remove: tuple[str, ...]) -> None:
        self.state.change_engines(add, remove)
        assert set(remove).isdisjoint(self.state.serving.engines or ())
        assert set(add) - set(remove) <= set(self.state.serving.engines or ())

    @rule(gateways=st.sampled_from(((), ("a",), ("a", "b"))), pick=pick)
    def set_gateways(self, gateways: tuple[str, ...], pick: int) -> None:
        self.state.set_living_gateways(gateways)
        trajectory = self.any_at_home(pick)
        if trajectory is not None:
            self.state.set_gateways(trajectory, gateways)

    @rule(pick=pick, gateway=gateway_names, key=st.sampled_from(("", "k")), repeats=st.sampled_from(Repeats))
    def begin_call(self, pick: int, gateway: str, key: str, repeats: Repeats) -> None:
        trajectory = self.any_at_home(pick, completed=False)
        if trajectory is not None:
            call = CallBegun(trajectory.uid, trajectory.group.prompt_uid, self.new_uid("s"), gateway, key, repeats)
            self.state.begin_call(call)
            assert trajectory.calls is not None
            assert trajectory.calls.gateways[call.uid] == gateway

    @rule(pick=pick, is_lost=st.booleans())
    def end_call(self, pick: int, is_lost: bool) -> None:
        trajectory = self.any_at_home(pick)
        if trajectory is not None and trajectory.calls is not None and trajectory.calls.gateways:
            uid = next(iter(trajectory.calls.gateways))
            self.state.end_call(trajectory.uid, uid, is_lost=is_lost)
            assert uid not in trajectory.calls.gateways
            assert (("", uid) in trajectory.lost_calls) == is_lost

    @rule(gateway=gateway_names, is_dead=st.booleans(), untold=st.booleans())
    def lose_gateway(self, gateway: str, is_dead: bool, untold: bool) -> None:
        if untold:
            self.state.lose_untold(gateway)
        self.state.lose_gateway(gateway, is_dead=is_dead)
        for trajectory in self.at_home():
            assert gateway not in (trajectory.gateways or ())
            assert trajectory.calls is None or gateway not in trajectory.calls.gateways.values()

    @rule(gateway=gateway_names, pick=pick)
    def tell_calls(self, gateway: str, pick: int) -> None:
        trajectory = self.any_at_home(pick)
        told = [] if trajectory is None else [uid for holder, uid in trajectory.lost_calls if holder == gateway]
        calls = [CallBegun(trajectory.uid, trajectory.group.prompt_uid, uid, gateway) for uid in told if trajectory]
        self.state.tell_calls(gateway, calls)
        for found in self.at_home():
            assert all(holder != gateway for holder, _ in found.lost_calls)
            held = [] if found.calls is None else [uid for uid, of in found.calls.gateways.items() if of == gateway]
            assert set(held) <= set(told)

    @rule(counts=st.lists(st.integers(1, 4), min_size=1, max_size=3))
    def set_layouts(self, counts: list[int]) -> None:
        layouts = [Layout(revision, shards) for revision, shards in enumerate(counts, start=1)]
        self.state.set_layouts(layouts, shard=0)

    @rule(name=names)
    def claim_unit(self, name: str) -> None:
        channel = self.state.open_channel(name)
        if channel.unit is None:
            self.state.claim_unit(channel, self.unit)

    @rule()
    def recall_and_load(self) -> None:
        """A new state from the rows of the journal, as after a restart."""
        self.commit()
        groups, leases, reader = self.read_journal()
        before = self.state
        now, self.state = self.state.now, PoolState(self.limits, self.journal, SLICES)
        self.state.advance(now, now)
        self.state.recall(reader.snapshot())
        records = list(groups.values())
        self.state.load_slices(reader.slice_rows())
        closed, ended = reader.closed(), reader.ended()
        decisions = reader.decisions()
        self.state.load(
            records,
            leases,
            closed=closed,
            ended=ended,
            acknowledged=list(reader.acknowledged()),
            decisions=decisions,
            damaged=False,
        )
        found = list(reader.tombstones())
        subjects = [one for one in found if isinstance(one, Tombstone)]
        self.state.load_tombstones(subjects, [one for one in found if isinstance(one, str)])
        assert self.state.tombstones.subjects == before.tombstones.subjects
        self.state.restart_sessions(now)
        assert replace(self.state.serving, revision=before.serving.revision) == before.serving
        assert self.state.decisions == before.decisions
        assert self.state.version_rewards.counts == before.version_rewards.counts
        self.rewards_read = Counter(self.state.version_rewards.counts)
        self.groups, self.empty = set(records), {group for group in records if not group.trajectories}
        self.position, self.seen = 0, {}
        self.by_step = False  # the next worker that asks tells

    # -- groups and trajectories ---------------------------------------------------------------------------------------

    def open_group(self, name: str, prompt: str, size: int) -> Group:
        channel = self.state.open_channel(name)
        group = channel.joinable(prompt)
        if group is None:
            group = self.state.open_group(prompt, channel, size, prompt, f"source {prompt}" if prompt == "q" else "")
            self.groups.add(group)
        self.empty.discard(group)
        return group

    @rule(
        name=names,
        prompt=st.sampled_from(("p", "q", session_prompt_uid("s"))),
        size=st.integers(1, 3),
        subject=st.sampled_from(("", "x", "y")),
    )
    def add_trajectory(self, name: str, prompt: str, size: int, subject: str) -> None:
        metadata: dict[str, Json] = {"n": size, "subject": subject}
        self.state.add_trajectory(self.open_group(name, prompt, size), self.new_uid("t"), metadata)

    @rule(pick=pick, name=names)
    def move_trajectory(self, pick: int, name: str) -> None:
        trajectory = self.any_at_home(pick, completed=False)
        if trajectory is not None and not trajectory.steps and name != trajectory.group.channel:
            self.state.move_trajectory(trajectory, self.open_group(name, trajectory.group.prompt_uid, 2))

    @rule(pick=pick, on_leased=st.booleans())
    def update_metadata(self, pick: int, on_leased: bool) -> None:
        """Of what is leased or trained, only marks change."""
        found = [*self.leased(), *self.state.history.values()] if on_leased else self.at_home()
        if found:
            trajectory = found[pick % len(found)]
            kept = trajectory.metadata if on_leased else {}
            self.state.update_metadata(trajectory, {**kept, "marks": [f"m{pick % 3}"]})

    @rule(pick=pick)
    def touch_session(self, pick: int) -> None:
        trajectory = self.any_at_home(pick)
        if trajectory is not None:
            self.state.touch_session(trajectory)

    @rule()
    def count_idle_end(self) -> None:
        before = self.state.stats().sessions.ended_idle
        self.state.count_idle_end()
        assert self.state.stats().sessions.ended_idle == before + 1

    @rule()
    def count_unfinished(self) -> None:
        before = self.state.stats().unfinished
        self.state.count_unfinished()
        assert self.state.stats().unfinished == before + 1

    @rule()
    def count_deferred(self) -> None:
        before = self.state.stats().sessions.deferred
        self.state.count_deferred(3)
        assert self.state.stats().sessions.deferred == before + 3

    @rule(pick=pick, reward=st.none() | values)
    def complete(self, pick: int, reward: float | None) -> None:
        trajectory = self.any_at_home(pick)
        if trajectory is None:
            return
        if reward is not None or any(step.quarantine is None for step in trajectory.steps.values()):
            self.state.complete(trajectory, reward, "completion")

    @rule(pick=pick, frees_place=st.booleans())
    def drop_trajectory(self, pick: int, frees_place: bool) -> None:
        trajectory = self.any_at_home(pick)
        if trajectory is not None:
            self.state.drop_trajectory(trajectory, "aborted", "note", frees_place=frees_place)

    @rule(pick=pick)
    def drop_group(self, pick: int) -> None:
        groups = self.queued()
        if groups:
            self.state.drop_group(groups[pick % len(groups)], "cleared")
            self.empty.discard(groups[pick % len(groups)])

    @rule(name=names)
    def evict(self, name: str) -> None:
        channel = self.state.open_channel(name)
        groups = [group for group in self.queued() if group.channel == name]
        most = max(0, min(self.limits.max_queue_size, len(groups) - 1))
        gone = self.to_evict(groups, most)
        self.state.evict(channel, more_groups=self.limits.max_queue_size - most)
        assert channel.groups.keys() == {group.seq for group in groups} - {group.seq for group in gone}
        self.empty -= set(gone)

    def to_evict(self, groups: list[Group], most: int) -> list[Group]:
        """One after the other, until at most so many groups are left, and few enough bytes."""
        gone: list[Group] = []
        while groups:
            nbytes, max_bytes = sum(group.nbytes for group in groups), self.limits.max_bytes
            by_bytes = max_bytes is not None and nbytes > max_bytes
            if not by_bytes and len(groups) <= most:
                break
            held: Counter[str | int] = Counter()
            for group in groups:
                held[group.producer or group.seq] += group.nbytes if by_bytes else 1
            largest = max(held.values())
            if largest <= LARGE * (max_bytes or 0 if by_bytes else self.limits.max_queue_size):
                largest = 0
            of_largest = [g for g in groups if not largest or held[g.producer or g.seq] == largest]
            gone.append(min(of_largest, key=lambda group: group.key))
            groups = [group for group in groups if group is not gone[-1]]
        return gone

    @rule(pick=pick, refill=st.booleans())
    def trim_group(self, pick: int, refill: bool) -> None:
        groups = [group for group in self.queued() if group.deadline is not None and not self.is_ready(group)]
        if not groups:
            return
        group = groups[pick % len(groups)]
        finished = [found for found in group.trajectories.values() if found.completed and self.is_scored(found)]
        if refill:
            self.state.trim_group(group, finished, "deadline", wait_until=self.state.now + 30)
            self.empty |= set() if finished else {group}
        elif finished:
            self.state.trim_group(group, finished, "deadline", wait_until=None)

    def is_scored(self, trajectory: Trajectory) -> bool:
        return trajectory.is_scored() or not self.limits.require_reward

    # -- steps ---------------------------------------------------------------------------------------------------------

    @rule(pick=pick, length=st.integers(0, 4), reward=st.none() | values, grade=st.sampled_from(Exactness))
    def add_step(self, pick: int, length: int, reward: float | None, grade: Exactness) -> None:
        trajectory = self.any_at_home(pick)
        if trajectory is not None:
            uid, ids = self.new_uid("s"), [1, *range(length)]
            step = make_step(trajectory.uid, uid=uid, prompt_ids=ids, started_at=pick, reward=reward, exactness=grade)
            self.state.add_step(trajectory, PackedSteps(pack([step])), 0)
            self.submitted["steps"] += 1

    @rule(pick=pick)
    def quarantine_step(self, pick: int) -> None:
        trajectory = self.any_at_home(pick)
        if trajectory is not None:
            step = make_step(trajectory.uid, uid=self.new_uid("s"), quarantine="bad_logprob: test")
            self.state.quarantine_step(trajectory, PackedSteps(pack([step])), 0)
            self.submitted["steps"] += 1

    @rule(pick=pick, mark=st.sampled_from(RANKS), early=st.booleans())
    def mark_steps(self, pick: int, mark: str, early: bool) -> None:
        """Also of a step that is still to come."""
        trajectory = self.any_at_home(pick)
        if trajectory is None:
            return
        uids = [self.new_uid("s")] if early else [step.uid for step in trajectory.held_steps()][:2]
        if early:
            self.early[uids[0]] = trajectory.uid
        marked = self.state.stats().marked.total()
        self.state.mark_steps(trajectory, uids, mark)
        changed = self.state.stats().marked.total() - marked
        assert changed <= len(uids)
        self.state.mark_steps(trajectory, uids, mark)
        again = self.state.stats().marked
        assert again.total() - again[LATE] <= marked + changed, "the same mark again changes nothing"

    @rule(pick=pick)
    def add_marked_step(self, pick: int) -> None:
        """A step that was marked before it came, or that its agent cut short."""
        found = [(uid, t) for uid, t in self.early.items() if t in {one.uid for one in self.at_home()}]
        if not found:
            return
        uid, of = found[pick % len(found)]
        del self.early[uid]
        cut = {"finish_reason": "cut_short", "exactness": Exactness.ENGINE}
        step = make_step(of, uid=uid, started_at=pick, untrainable="greedy: test" if pick % 2 else None, **cut)
        self.state.add_step(self.state.trajectories[of], PackedSteps(pack([step])), 0)
        self.submitted["steps"] += 1

    @rule()
    def count_mark(self) -> None:
        before = self.state.stats().marked[LATE]
        self.state.count_mark(LATE)
        assert self.state.stats().marked[LATE] == before + 1

    @invariant()
    def what_is_marked_is_trained_only_if_somebody_read_it(self) -> None:
        for trajectory in self.at_home():
            for uid, (mark, own) in trajectory.marks.items():
                if (step := trajectory.steps.get(uid)) is not None:
                    kind = None if step.untrainable is None else fault_kind(step.untrainable)
                    is_left_out = kind in (UNSEEN, NOT_CONTINUED)
                    assert is_left_out == (mark in (UNSEEN, NOT_CONTINUED))
                    assert is_left_out or step.untrainable in (own, A_CALL_IS_MISSING)
                    if is_left_out:
                        assert not StepFilter(Exactness.RETOKENIZED, untrainable=True).accepts(step)

    @rule()
    def count_refusal(self) -> None:
        self.state.count_refusal("late")
        self.submitted["refused"] += 1

    @precondition(lambda self: self.unit is Unit.STEPS)
    @rule(pick=pick, wanted=st.booleans())
    def leave_out_or_drop_step(self, pick: int, wanted: bool) -> None:
        found = [leased for channel in self.state.channels.values() for leased in channel.oldest_steps(100)]
        if not found:
            return
        trajectory, step = found[pick % len(found)]
        if wanted:
            self.state.drop_step(trajectory, step, "stale")
        else:
            self.state.ship_step(trajectory, step, StepFilter(Exactness.ENGINE, untrainable=False))

    # -- rewards -------------------------------------------------------------------------------------------------------

    @rule(pick=pick, value=values)
    def set_reward(self, pick: int, value: float) -> None:
        trajectory = self.any_at_home(pick)
        if trajectory is not None:
            self.state.set_reward(trajectory, value, "test", parts={"a": value}, notes="why")

    @rule(pick=pick, value=values, notes=st.sampled_from(("", "why")))
    def set_step_reward(self, pick: int, value: float, notes: str) -> None:
        trajectory = self.any_at_home(pick)
        free = [] if trajectory is None else [step for step in trajectory.held_steps() if step.lease is None]
        if trajectory is not None and free:
            self.state.set_step_reward(trajectory, free[pick % len(free)], value, "test", notes=notes)

    @rule(pick=pick, value=values, of_step=st.booleans())
    def keep_reward(self, pick: int, value: float, of_step: bool) -> None:
        found = [(trajectory, step) for trajectory in self.leased() for step in trajectory.held_steps()]
        found += [taken for lease in self.state.leases.values() for taken in lease.steps]
        if found:
            trajectory, step = found[pick % len(found)]
            is_whole = trajectory.group.lease is not None and not of_step
            self.state.keep_reward(trajectory, None if is_whole else step, value, "test", "why")

    @rule(pick=pick, value=values)
    def relabel(self, pick: int, value: float) -> None:
        found = [*self.at_home(), *self.leased(), *self.state.history.values()]
        if found:
            self.state.relabel(found[pick % len(found)], value, "curation:ana", "why")

    @precondition(lambda self: self.limits.require_reward)
    @rule(pick=pick)
    def count_late_reward(self, pick: int) -> None:
        uids = [*(found.uid for found in self.leased()), *self.state.closed]
        if uids:
            before = self.state.closed.get(uids[pick % len(uids)])
            number = self.state.count_late_reward(uids[pick % len(uids)])
            assert before is None or number == before + 1

    @rule(count=st.integers(1, 3), seconds=st.integers(1, 20))
    def lease_for_scoring(self, count: int, seconds: int) -> None:
        chosen = self.state.oldest_unscored(count)
        if chosen:
            uid = self.new_uid("reward-lease")
            self.state.lease_for_scoring(uid, self.state.now + seconds, chosen)
            assert self.state.under_reward_lease(uid) == chosen

    @rule(pick=pick)
    def end_scoring(self, pick: int) -> None:
        leases = sorted(self.state.reward_leases)
        if leases:
            self.state.end_scoring(leases[pick % len(leases)])

    @rule(pick=pick, outcome=st.sampled_from(JudgementOutcome), then=st.sampled_from(("rest", "give up", "nothing")))
    def settle_scoring(self, pick: int, outcome: JudgementOutcome, then: str) -> None:
        found = [t for t in self.at_home() if t.reward_lease and self.state.being_scored(t.reward_lease, t.uid) is t]
        if not found:
            self.state.count_late_judgement()
            return
        trajectory = found[pick % len(found)]
        if outcome is JudgementOutcome.SCORE:
            self.state.settle_scoring(trajectory)
            self.state.count_scored()
            self.state.count_abstention()
        else:
            self.state.fail_scoring(trajectory, outcome)
        if then == "rest":
            self.state.rest_scoring(trajectory, self.state.now + 5)
        elif then == "give up":
            self.state.give_up_scoring(trajectory)

    @rule(pick=pick)
    def abstain_from_step(self, pick: int) -> None:
        trajectory = self.any_at_home(pick)
        steps = [] if trajectory is None else trajectory.held_steps()
        if trajectory is not None and steps:
            self.state.abstain_from_step(trajectory, steps[pick % len(steps)], {"abstained": "why"})

    @rule(by_step=st.booleans())
    def judge_by_step(self, by_step: bool) -> None:
        self.state.judge_by_step(by_step)
        self.by_step = by_step and self.limits.require_reward

    def awaits_steps(self, trajectory: Trajectory) -> bool:
        return self.by_step and trajectory.has_steps_due() and trajectory.reward_lease != GIVEN_UP

    # -- leases --------------------------------------------------------------------------------------------------------

    @rule(pick=pick, count=st.integers(1, 2), seconds=st.integers(1, 20), grade=st.sampled_from(Exactness))
    def lease_out(self, pick: int, count: int, seconds: int, grade: Exactness) -> None:
        for name, channel in self.state.channels.items():
            if channel.unit is not self.unit:
                continue
            step_filter = StepFilter(grade, untrainable=True)
            lease = Lease(self.new_uid("lease"), name, self.state.now + seconds, step_filter)
            if self.unit is Unit.GROUPS:
                lease.groups += [group for group in self.ready_groups() if group.channel == name][:count]
            elif self.unit is Unit.TRAJECTORIES:
                keys = channel.ready_trajectories.smallest(count)
                lease.groups += [self.state.split_off(self.state.trajectories[uid]) for *_, uid in keys]
                self.groups |= set(lease.groups)
            else:
                lease.steps += channel.oldest_steps(count)
            if lease.groups or lease.steps:
                self.state.lease_out(lease)

    @rule(pick=pick, seconds=st.integers(1, 60))
    def extend_lease(self, pick: int, seconds: int) -> None:
        leases = list(self.state.leases.values())
        if leases:
            self.state.extend_lease(leases[pick % len(leases)], self.state.pool_time + seconds)
            self.state.prepare_lease(leases[pick % len(leases)])

    @rule(pick=pick, how=st.sampled_from((Settlement.DONE, Settlement.EXPIRED)))
    def decide(self, pick: int, how: Settlement) -> None:
        uid = f"batch-{pick}:decision"
        if uid in self.state.acknowledged:
            self.state.settle(uid)
            assert uid not in self.state.acknowledged
        elif uid not in self.state.ended_leases:
            self.state.decide(uid, how)
            assert self.state.ended_leases.get(uid, Settlement.DONE) is how
            assert (uid in self.state.acknowledged) is (how is Settlement.DONE)

    @rule(pick=pick, how=st.sampled_from(("ack", "nack", "expired")))
    def end_lease(self, pick: int, how: str) -> None:
        leases = list(self.state.leases.values())
        if not leases:
            return
        lease = leases[pick % len(leases)]
        if how == "ack":
            self.state.mark_trained(lease)
        else:
            settlement = Settlement.DONE if how == "nack" else Settlement.EXPIRED
            self.state.return_leased(lease, settlement, attempted=how == "expired")

    @precondition(lambda self: self.unit is Unit.GROUPS)
    @rule(pick=pick)
    def leave_out(self, pick: int) -> None:
        groups = self.ready_groups()
        if groups:
            self.state.leave_out(groups[pick % len(groups)], StepFilter(Exactness.ENGINE, untrainable=False))

    # -- people --------------------------------------------------------------------------------------------------------

    @rule(pick=pick)
    def reject_when_returned(self, pick: int) -> None:
        found = self.leased()
        if found:
            self.state.reject_when_returned(found[pick % len(found)], "by ana")

    @rule(pick=pick)
    def remove_from_history(self, pick: int) -> None:
        found = list(self.state.history.values())
        if found:
            self.state.remove_from_history(found[pick % len(found)], "rejected by ana")

    @rule()
    def retire_history(self) -> None:
        self.state.retire_history()
        assert not self.state.history

    @rule(pick=pick)
    def remove_trajectory(self, pick: int) -> None:
        """For good, wherever it is. A reader begins anew afterwards."""
        held = list(self.state.trajectories.values())
        if not held:
            return
        uid = held[pick % len(held)].uid
        self.state.remove_trajectory(self.state.trajectories[uid], "removed")
        self.state.remove_closed("no subject", [uid])
        goes_on = any(session_id_of(found.group.prompt_uid) for found in self.state.trajectories.values())
        self.state.remove_sessions(lambda _, last: last == uid and not goes_on)
        quarantined = sum(step.trajectory_uid == uid for step in self.state.quarantine)
        assert self.state.remove_quarantined(lambda step: step.trajectory_uid == uid) == quarantined
        self.position, self.seen = 0, {}
        assert uid not in {*self.state.trajectories, *self.state.closed, *self.state.change_log.gone}
        assert uid not in {step.trajectory_uid for step in self.state.quarantine}

    @rule(subject=st.sampled_from(("x", "y")))
    def remove_subject(self, subject: str) -> None:
        """A reader begins anew afterwards."""
        state, tombstones = self.state, self.state.tombstones
        tombstone = self.state.refuse_subject(tombstones.digest(subject), state.now)
        removal = Removal(tombstone, state)
        for trajectory in [*state.trajectories.values(), *state.history.values()]:
            if trajectory.metadata.get("subject") == subject:
                removal.note(trajectory, "somewhere")
        assert {*removal.remove_held()} == {None}
        removal.remove_from_slices()
        assert self.state.refuse_names([tombstones.digest("a name")]) in (0, 1)
        self.state.save_tombstone(tombstone)
        self.position, self.seen = 0, {}
        held = [*state.trajectories.values(), *state.history.values()]
        assert not any(trajectory.metadata.get("subject") == subject for trajectory in held)
        assert tombstone.subject not in state.closed_subjects.values()

    @rule(seconds=st.integers(1, 60) | st.none())
    def remove_overdue(self, seconds: int | None) -> None:
        """What is too old is gone; what is not is left."""
        state, before = self.state, {**self.state.trajectories, **self.state.history}
        removal = Removal(note_overdue(state, seconds, state.now, by_clock=True), state)
        overdue = {found.uid for found in removal.covered()}
        assert {found.uid for found in removal.kept_back(0.0)} <= overdue
        assert overdue == {uid for uid, t in before.items() if seconds is not None and t.born <= state.now - seconds}
        assert {*removal.remove_held()} == {None}
        assert {*state.trajectories, *state.history} == before.keys() - overdue
        removal.tombstone.is_done = True
        removal.save()
        self.position, self.seen = 0, {}

    @rule()
    def record_audit(self) -> None:
        action, outcome = CurationAction.REJECT, CurationOutcome.LATE
        entry = AuditEntry(at=1.0, by="ana", action=action, trajectory_uid="t", prompt_uid="p", outcome=outcome)
        self.state.slice_of(AuditTrail).add(entry)

    @rule(pick=pick)
    def show_again(self, pick: int) -> None:
        held = list(self.state.trajectories.values())
        if held:
            self.state.show_again([held[pick % len(held)]])

    # -- the slow computation ------------------------------------------------------------------------------------------

    def commit(self) -> None:
        self.journal.remove_retired()
        self.journal.commit(self.state.snapshot())
        self.state.pack_at_rest(awake=0)

    def read_journal(self) -> tuple[dict[int, Group], dict[str, Lease], JournalReader]:
        reader = JournalReader(self.journal)
        groups = {group.seq: group for group in reader.groups()}
        trajectories = {trajectory.number: trajectory for trajectory in reader.trajectories(groups)}
        assert reader.read_steps(trajectories) == []
        assert not reader.damaged
        return groups, {lease.uid: lease for lease in reader.leases()}, reader

    @invariant()
    def the_journal_has_every_record_and_no_other(self) -> None:
        self.commit()
        groups, leases, reader = self.read_journal()
        history = [group for channel in self.state.channels.values() for group in channel.history]
        leased = [group for lease in self.state.leases.values() for group in lease.groups]
        held = sorted([*self.queued(), *history, *leased], key=lambda group: group.seq)
        assert [dump_group(group) for group in groups.values()] == [dump_group(group) for group in held]
        told = {uid: (lease.channel, lease.expires_at, lease.step_filter) for uid, lease in leases.items()}
        assert told == {
            uid: (lease.channel, lease.expires_at, lease.step_filter) for uid, lease in self.state.leases.items()
        }
        assert {uid: revision for uid, revision, _ in reader.closed()} == dict(self.state.closed)
        assert {uid: subject for uid, _, subject in reader.closed() if subject} == self.state.closed_subjects
        kept = {*self.state.tombstones.names, *self.state.tombstones.subjects}
        assert {one if isinstance(one, str) else one.subject for one in reader.tombstones()} == kept
        assert dict(reader.ended()) == dict(self.state.ended_leases)
        assert set(reader.acknowledged()) == self.state.acknowledged
        trail = self.state.slice_of(AuditTrail)
        rows = {key: value for name, key, value in reader.slice_rows() if name == trail.name}
        assert rows == trail.dump()
        assert list(reader.decisions()) == list(self.state.decisions)
        PoolState(self.limits, StateJournal()).recall(reader.snapshot())

    @invariant()
    def the_records_agree_with_one_another(self) -> None:
        state = self.state
        leased = [group for lease in state.leases.values() for group in lease.groups]
        held = [trajectory for group in [*self.queued(), *leased] for trajectory in group.trajectories.values()]
        assert {trajectory.uid: trajectory for trajectory in held} == state.trajectories
        history = [group for channel in state.channels.values() for group in channel.history]
        assert {t.uid: t for group in history for t in group.trajectories.values()} == state.history
        assert not state.closed.keys() & state.trajectories.keys()
        assert {(lease.expires_at, uid) for uid, lease in state.leases.items()} == set(state._expiry)
        assert all(group.lease in state.leases for group in leased)
        for group in [*self.queued(), *leased, *history]:
            held_bytes = sum(stored_bytes(trajectory) for trajectory in group.trajectories.values())
            assert group.nbytes == A_GROUP + held_bytes
            assert all(trajectory.nbytes == stored_bytes(trajectory) for trajectory in group.trajectories.values())
            assert all(trajectory.group is group for trajectory in group.trajectories.values())

    @invariant()
    def the_indexes_have_what_they_should(self) -> None:
        queued, needs_reward = self.queued(), self.limits.require_reward
        for name, channel in self.state.channels.items():
            groups = [group for group in queued if group.channel == name]
            ready = [group for group in groups if self.is_ready(group)]
            assert channel.groups == {group.seq: group for group in groups}
            assert set(channel.by_age) == {group.key for group in groups}
            assert set(channel.ready) == {group.key for group in ready}
            sizes = Counter((group.source, group.size) for group in ready)
            counts = channel.by_size.counts()
            assert {(source, size): n for source, found in counts.items() for size, n in found.items()} == sizes
            joinable = {(group.prompt_uid, group.seq) for group in groups if group.can_join()}
            assert {(prompt, seq) for prompt, found in channel._joinable.items() for seq in found} == joinable
            waiting = [group for group in groups if group.deadline is not None and group not in ready]
            assert set(channel.deadlines) == {(group.deadline, group.seq) for group in waiting}
            assert set(channel.refills) <= {seq for _, seq in joinable}
            assert channel.nbytes == sum(group.nbytes for group in groups)
            self.check_shares(channel.producers, groups)
            assert channel.trajectories == sum(len(group.trajectories) for group in groups)
            assert channel.completed == sum(group.completed for group in groups)
            leased = [g for lease in self.state.leases.values() for g in lease.groups if g.channel == name]
            assert channel.leased_groups == len(leased)
            assert channel.leased_bytes == sum(group.nbytes for group in leased)
            held = [trajectory for group in groups for trajectory in group.trajectories.values()]
            scored = [
                found for found in held if not needs_reward or (found.is_scored() and not self.awaits_steps(found))
            ]
            complete = {found.key for found in scored if found.completed}
            assert set(channel.ready_trajectories) == (complete if channel.unit is Unit.TRAJECTORIES else set())
            steps = {(step.number,) for found in held for step in found.steps.values() if self.can_go(found, step)}
            assert set(channel.ready_steps) == (steps if channel.unit is Unit.STEPS else set())

    def check_shares(self, shares: ProducerShares, groups: list[Group]) -> None:
        by_producer: dict[str | int, list[Group]] = {}
        for group in groups:
            by_producer.setdefault(group.producer or group.seq, []).append(group)
        held = {name: sum(group.nbytes for group in found) for name, found in by_producer.items()}
        named = [name for name in held if isinstance(name, str)]
        assert {name: share.nbytes for name, share in shares._shares.items()} == {name: held[name] for name in named}
        keys = {name: {group.key for group in found} for name, found in by_producer.items()}
        assert {name: set(share.groups) for name, share in shares._shares.items()} == {n: keys[n] for n in named}
        large_bytes = inf if self.limits.max_bytes is None else LARGE * self.limits.max_bytes
        large_groups = LARGE * self.limits.max_queue_size
        large = {name for name in held if held[name] > large_bytes or len(keys[name]) > large_groups}
        assert shares._large.keys() == large

    @invariant()
    def the_steps_of_incomplete_rollouts_are_marked(self) -> None:
        for trajectory in self.at_home():
            free = [step for step in trajectory.held_steps() if step.lease is None]
            marked = {step.untrainable for step in free} & {A_CALL_IS_MISSING, None}
            assert marked <= {A_CALL_IS_MISSING if trajectory.lost_calls else None}

    @invariant()
    def the_sessions_are_those_that_are_open(self) -> None:
        held = self.state.trajectories.values()
        sessions = [found for found in held if session_id_of(found.group.prompt_uid)]
        assert set(self.state.sessions.called) == {found.uid for found in sessions if not found.completed}
        assert set(self.state.sessions.idle_since(self.state.pool_time)) == set(self.state.sessions.called)
        last = self.state.sessions.find("s")
        assert not sessions or (last is not None and last.number >= max(found.number for found in sessions))

    def can_go(self, trajectory: Trajectory, step: StoredStep) -> bool:
        if not step.is_held() or step.lease is not None:
            return False
        is_scored = trajectory.completed and trajectory.is_scored() and not self.awaits_steps(trajectory)
        return step.reward is not None or is_scored or not self.limits.require_reward

    @invariant()
    def the_ledgers_have_what_is_held(self) -> None:
        leased = [group for lease in self.state.leases.values() for group in lease.groups]
        for name, channel in self.state.channels.items():
            groups = [group for group in [*self.queued(), *leased] if group.channel == name]
            assert channel.ledger.held() == count_steps(step for group in groups for step in group.held_steps())
        stats = self.state.stats()
        accepted = sum(channel.accepted.steps for channel in stats.channels.values())
        assert stats.submitted == accepted + stats.quarantined.total() + stats.refused.total()
        assert stats.submitted == self.submitted["steps"] + self.submitted["refused"]

    @invariant()
    def the_reward_queue_has_what_lacks_a_reward(self) -> None:
        due = Trajectory.has_steps_due if self.by_step else Trajectory.lacks_reward
        free = [found for found in self.at_home() if found.reward_lease is None and due(found)]
        expected = sorted(found.key for found in free) if self.limits.require_reward else []
        assert [found.key for found in self.state.oldest_unscored(10**6)] == expected

    @invariant()
    def the_first_reward_of_each_thing_counts_for_its_version(self) -> None:
        """Each is read once, whatever was rewarded again since."""
        log, uids = self.state.version_rewards, list[str]()
        for channel in self.state.channels:
            read = log.since(channel, self.rewards_read[channel])
            assert log.end(channel) == self.rewards_read[channel] + len(read)
            self.rewards_read[channel] = log.end(channel)
            uids += [reward.trajectory_uid for reward in read]
        new = {thing for uid in uids for thing in self.rewarded_things(uid)} - self.rewarded
        assert len(new) >= len(uids), "something was counted twice"
        held = [*self.state.trajectories.values(), *self.state.history.values()]
        self.rewarded |= {thing for found in held for thing in self.rewarded_things(found.uid)}

    def rewarded_things(self, uid: str) -> list[tuple[str, str]]:
        trajectory = self.state.trajectories.get(uid) or self.state.history.get(uid)
        if trajectory is None:  # its last reward has made it leave
            return [(uid, "")]
        own = [] if trajectory.reward is None else [(uid, "")]
        return own + [(uid, step.identity) for step in trajectory.scored_steps()]

    @invariant()
    def a_reader_of_the_change_log_knows_how_everything_stands(self) -> None:
        page = PoolView(self.state).page(self.position, 10**6)
        self.position = page.position
        self.seen |= {found.trajectory_uid: found for found in page.snapshots}
        held = {uid: found for uid, found in self.seen.items() if found.state not in GONE}
        assert {uid: timeless(found) for uid, found in held.items()} == {
            uid: self.standing(trajectory) for uid, trajectory in self.state.trajectories.items()
        }
        for uid, trajectory in self.state.history.items():
            known = self.seen[uid]
            assert timeless(known) == timeless(
                snapshot_of(trajectory, TrajectoryState.TRAINED, known.cause, known.note)
            )

    def standing(self, trajectory: Trajectory) -> TrajectorySnapshot:
        channel = self.state.channels[trajectory.group.channel]
        state, cause = standing_of(trajectory, channel, require_reward=self.limits.require_reward)
        remark = self.state.remark_on(trajectory)
        return timeless(snapshot_of(trajectory, state, cause, note_of(trajectory))._replace(remark=remark))


def timeless(snapshot: TrajectorySnapshot) -> TrajectorySnapshot:
    """A late reward is counted without an entry in the log."""
    return snapshot._replace(position=0, changed_at=0.0, revision=0)


def stored_bytes(trajectory: Trajectory) -> int:
    a_step = A_PACKED_STEP if trajectory.completed else A_STEP
    metadata = json_bytes(trajectory.metadata)
    return A_TRAJECTORY + metadata + sum(step.nbytes + a_step for step in trajectory.steps.values())


def dump_group(group: Group) -> tuple[Any, ...]:
    found = sorted(group.trajectories.values(), key=lambda trajectory: trajectory.number)
    return group.seq, *(getattr(group, name) for name in GROUP_FIELDS), *map(dump_trajectory, found)


def dump_trajectory(trajectory: Trajectory) -> tuple[Any, ...]:
    own = {name: getattr(trajectory, name) for name in TRAJECTORY_FIELDS if name != "step_count"}
    steps = sorted(trajectory.steps.values(), key=lambda step: step.number)
    return trajectory.number, own, *(dump_step(trajectory, step) for step in steps)


def dump_step(trajectory: Trajectory, step: StoredStep) -> tuple[Any, ...]:
    changing = (step.number, step.reward, step.reward_source, step.reward_revision, step.lease, step.shipped)
    tokens = None if step.quarantine else trajectory.tokens.read(step.branch, step.tokens).tolist()
    logprobs = None if step.logprobs is None else step.logprobs.tolist()
    own = (None if getattr(step, name) == A_CALL_IS_MISSING else getattr(step, name) for name in OWN_NAMES)
    return *changing, *own, step.carried, tokens, logprobs


class ScoredGroups(StateMachine):
    limits = Limits(require_reward=True, history_size=1, group_deadline=30, closed_kept=1000)


class FullChannels(StateMachine):
    limits = Limits(max_queue_size=20, max_bytes=8_000, closed_kept=1000)


class ByTrajectories(StateMachine):
    limits = Limits(require_reward=True)
    unit = Unit.TRAJECTORIES


class BySteps(StateMachine):
    unit = Unit.STEPS


class ScoredSteps(StateMachine):
    limits = Limits(require_reward=True)
    unit = Unit.STEPS


for machine in (StateMachine, ScoredGroups, FullChannels, ByTrajectories, BySteps, ScoredSteps):
    machine.TestCase.settings = settings(max_examples=20, stateful_step_count=50, deadline=None)

test_by_groups = StateMachine.TestCase
test_by_scored_groups = ScoredGroups.TestCase
test_in_full_channels = FullChannels.TestCase
test_by_trajectories = ByTrajectories.TestCase
test_by_steps = BySteps.TestCase
test_by_scored_steps = ScoredSteps.TestCase


def test_every_operation_is_run() -> None:
    operations = {name for name, _ in inspect.getmembers(PoolState, inspect.isfunction) if not name.startswith("_")}
    assert operations - READS == set(re.findall(r"self\.state\.(\w+)\(", inspect.getsource(StateMachine))) - READS


def test_a_pool_has_a_limited_number_of_channels() -> None:
    state = PoolState(Limits(max_channels=1), StateJournal())
    state.open_channel("train")
    with pytest.raises(BadRequest, match="one too many"):
        state.open_channel("validation")


def test_marks_of_steps_that_never_come_are_bounded_and_counted() -> None:
    state = PoolState(Limits(), StateJournal())
    trajectory = state.add_trajectory(state.open_group("p", state.open_channel("train"), 1), "t", {})
    state.mark_steps(trajectory, [f"s{n}" for n in range(MOST_EARLY + 7)], UNSEEN)
    assert len(trajectory.marks) == MOST_EARLY
    assert state.stats().marked == {UNSEEN: MOST_EARLY, TOO_MANY: 7}


def test_a_message_is_unpacked_once_whatever_is_quarantined(monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked: list[int] = []

    def counting(columns: Any, *, copy: bool) -> Any:
        unpacked.append(len(columns))
        return unpack(columns, copy=copy)

    monkeypatch.setattr("stepwell.pool.state.stored_step.unpack", counting)
    state = PoolState(Limits(), StateJournal())
    group = state.open_group("p", state.open_channel("train"), 1)
    trajectory = state.add_trajectory(group, "t", {})
    bad = [make_step(uid=str(n), quarantine="bad_logprob: test", response_ids=[n]) for n in range(50)]
    packed = PackedSteps(pack(bad))
    for i in range(50):
        state.quarantine_step(trajectory, packed, i)
    assert sum(unpacked) == 50 + 50, "the message once, and each kept step by itself"
    assert [step.response_ids.tolist() for step in state.quarantine] == [[n] for n in range(50)]
    assert all(step.prompt_ids.base is None or len(step.prompt_ids.base) == 3 for step in state.quarantine)
