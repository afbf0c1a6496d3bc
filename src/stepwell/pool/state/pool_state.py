"""The pool's state and the only object that changes it.

- Each public method that changes something is one operation. When it returns, journal, change log, indexes, ledgers and
  reward queue agree with the records.
- A trajectory is in one group. A group is in one channel or under one lease.
- Data that leaves is counted under a cause, and its trajectories are remembered as closed.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from stepwell.pool.api.curation import AuditEntry
from stepwell.pool.api.leasing import Settlement, Unit
from stepwell.pool.api.scoring import JudgementOutcome
from stepwell.pool.api.serving_state import Serving
from stepwell.pool.api.watching import TrajectoryState
from stepwell.pool.state.channel_index import Channel
from stepwell.pool.state.counters import Counters, load_ledger
from stepwell.pool.state.ledger import count_steps
from stepwell.pool.state.records import Group, Lease, Trajectory
from stepwell.pool.state.state_base import StateBase
from stepwell.pool.state.stored_step import PackedSteps, StoredStep
from stepwell.steps.returns import GivenReward
from stepwell.steps.soundness import fault_kind
from stepwell.steps.step import Json, JsonObject
from stepwell.steps.step_filter import StepFilter

REJECTED = "rejected"
"""The cause of what a person rejected."""


class PoolState(StateBase):
    """The operations. Records, reading and the helpers that they end in are in StateBase."""

    # -- the pool ------------------------------------------------------------------------------------------------------

    def advance(self, now: float, pool_time: float) -> None:
        """Set the clocks, and offer again what reward workers did not judge in time."""
        self.now = self.change_log.now = now
        self.pool_time = pool_time
        self.series.tick(now)
        self._rewards.release(pool_time)

    def set_policy_version(self, version: int) -> None:
        self.serving = replace(self.serving, policy_version=version, revision=self.serving.revision + 1)

    def change_engines(self, add: tuple[str, ...], remove: tuple[str, ...]) -> None:
        engines = self.serving.changed(add, remove)
        if engines != self.serving.engines:
            self.serving = replace(self.serving, engines=engines, revision=self.serving.revision + 1)

    def set_living_gateways(self, gateways: tuple[str, ...]) -> None:
        self.gateways = gateways

    def open_channel(self, name: str) -> Channel:
        """The channel of that name, a new one if there is none."""
        return self._index(name)

    def claim_unit(self, channel: Channel, unit: Unit) -> None:
        """The channel is consumed by that unit from now on."""
        index = self._channels[channel.name]
        index.claim(unit)
        if unit is not Unit.GROUPS:
            for group in index.groups.values():
                self.change_log.record_all(group.trajectories.values())

    # -- groups and trajectories ---------------------------------------------------------------------------------------

    def open_group(self, prompt_uid: str, channel: Channel, size: int, source: str = "") -> Group:
        self._counters.opened += 1
        seq = self._counters.opened
        wait = self.limits.group_deadline
        deadline = None if wait is None else self.pool_time + wait
        group = Group(seq, seq, prompt_uid, channel.name, size, self.now, deadline, source=source)
        self._channels[channel.name].add(group)
        self._journal.save_group(group)
        return group

    def add_trajectory(
        self, group: Group, uid: str, metadata: JsonObject, outcome: GivenReward | None = None
    ) -> Trajectory:
        self._counters.registered += 1
        trajectory = Trajectory(uid, group, metadata, self._counters.registered, gateways=frozenset())
        if outcome is not None:
            trajectory.reward, trajectory.reward_source = outcome.value, outcome.source
            trajectory.reward_revision = outcome.revision
        self._join(group, trajectory)
        return trajectory

    def move_trajectory(self, trajectory: Trajectory, group: Group) -> None:
        """To another group. It has no steps yet."""
        self._take_out(trajectory)
        self._join(group, trajectory)

    def update_metadata(self, trajectory: Trajectory, metadata: JsonObject) -> None:
        trajectory.metadata = metadata
        self._changed(trajectory)

    def set_gateways(self, trajectory: Trajectory, gateways: Iterable[str]) -> None:
        """Those that may hold steps of it."""
        trajectory.gateways = frozenset(gateways)

    def complete(self, trajectory: Trajectory, reward: float | None = None, source: str = "") -> None:
        """The rollout is over. Doing it again is harmless, and may bring another reward."""
        group, is_new = trajectory.group, not trajectory.completed
        if reward is not None:
            self._set_reward(trajectory, reward, source)
        if is_new:
            trajectory.completed, trajectory.completed_at = True, self.now
            trajectory.completed_time = self.pool_time
            self._channels[group.channel].completed += 1
        if is_new or reward is not None:
            self._changed(trajectory)
        if is_new and self.limits.require_reward:  # the others of its group may wait for something else from now on
            self.change_log.record_all(group.trajectories.values())
        self._regrouped(group)
        self._close_if_spent(group)

    def drop_trajectory(self, trajectory: Trajectory, cause: str, note: str = "", *, frees_place: bool = True) -> None:
        """If its place is free, another rollout can join the group. Otherwise the group becomes smaller."""
        group = trajectory.group
        self._channels[group.channel].ledger.drop(cause, trajectory.held_steps())
        if not frees_place:
            group.give_up(1)
            self._journal.save_group(group)
        self._take_out(trajectory)
        self._journal.remove_trajectory(trajectory)
        self._close(trajectory, TrajectoryState.DROPPED, cause, note)
        if group.trajectories and not frees_place:
            self._close_if_spent(group)

    def drop_group(self, group: Group, cause: str, note: str = "") -> None:
        self._leave(group)
        self._channels[group.channel].ledger.drop(cause, group.held_steps())
        self._journal.remove_group(group)
        for trajectory in group.trajectories.values():
            self._close(trajectory, TrajectoryState.DROPPED, cause, note)
        group.dissolve()

    def evict_oldest(self, channel: Channel, more_groups: int = 0) -> None:
        """Drop the oldest groups until the channel is within its limits, with room for that many more."""
        while channel.is_over(more_groups) and (oldest := channel.oldest()) is not None:
            self.drop_group(oldest, "evicted")

    def trim_group(self, group: Group, keep: Collection[Trajectory], cause: str, *, wait_until: float | None) -> None:
        """Drop the other trajectories. With a new deadline, producers are asked for as many; else the group shrinks."""
        index = self._channels[group.channel]
        self._leave(group)
        for trajectory in [found for found in group.trajectories.values() if found not in keep]:
            index.ledger.drop(cause, trajectory.held_steps())
            del group.trajectories[trajectory.uid]
            group.nbytes -= trajectory.nbytes
            self._journal.remove_trajectory(trajectory)
            self._close(trajectory, TrajectoryState.DROPPED, cause)
        group.deadline = wait_until
        if wait_until is None:
            group.give_up(group.size - len(group.trajectories))
        self._enter(group)
        if wait_until is not None:
            self._regrouped(group)
            index.refills[group.seq] = group
        self._journal.save_group(group)

    def split_off(self, trajectory: Trajectory) -> Group:
        """A complete trajectory as a group of its own: it can be handed out before the others are complete."""
        group = trajectory.group
        if group.size == 1:
            return group
        group.give_up(1)
        self._journal.save_group(group)
        self._take_out(trajectory)
        self._counters.opened += 1
        seq = self._counters.opened
        alone = Group(seq, group.age, group.prompt_uid, group.channel, 1, group.opened_at, source=group.source)
        alone.nbytes = trajectory.nbytes
        self._channels[group.channel].add(alone)
        self._journal.save_group(alone)
        self._join(alone, trajectory)
        return alone

    # -- steps ---------------------------------------------------------------------------------------------------------

    def count_refusal(self, verdict: str) -> None:
        self._counters.submitted += 1
        self._counters.refused[verdict] += 1

    def add_step(self, trajectory: Trajectory, packed: PackedSteps, i: int) -> StoredStep:
        """Accept a step. A reward that comes with it does not count if a person gave the trajectory its reward."""
        counters, group = self._counters, trajectory.group
        counters.submitted += 1
        counters.arrived += 1
        step = packed.stored(i, counters.arrived)
        if step.reward is not None and trajectory.is_relabelled:
            step.reward, step.reward_source = None, ""
        placement = trajectory.tokens.place(packed.tokens(i))
        counters.forks += placement.is_fork
        step.branch = placement.branch
        step.nbytes = placement.added.nbytes
        if step.logprobs is not None:
            step.nbytes += step.logprobs.nbytes
        if step.mask is not None:
            step.nbytes += step.mask.nbytes
        trajectory.steps[step.identity] = step
        group.nbytes += step.nbytes
        self._channels[group.channel].add_step(trajectory, step)
        self._journal.add_step(trajectory, step, placement)
        trajectory.reward_lease = None  # a reward worker that has it did not see all of it
        self.change_log.record(trajectory)
        if trajectory.completed:
            counters.in_grace += 1
            self._update_rewards(trajectory)
            self._regrouped(group)
        return step

    def quarantine_step(self, trajectory: Trajectory, packed: PackedSteps, i: int) -> None:
        """Keep the step for inspection only. Its place in the trajectory stays taken."""
        self._counters.submitted += 1
        self._counters.arrived += 1
        step = packed.stored(i, self._counters.arrived)
        self._counters.quarantined[fault_kind(step.quarantine or "")] += 1
        self.quarantine.append(packed.copy_step(i))
        step.prompt_length = step.response_length = 0
        step.logprobs = step.mask = None
        trajectory.steps[step.identity] = step
        self.change_log.record(trajectory)
        self._journal.add_step(trajectory, step, None)

    def drop_step(self, trajectory: Trajectory, step: StoredStep, cause: str) -> None:
        self._channels[trajectory.group.channel].ledger.drop(cause, (step,))
        self._retire_step(trajectory, step)

    def ship_step(self, trajectory: Trajectory, step: StoredStep, step_filter: StepFilter) -> None:
        """A consumer of single steps has acknowledged it, or its filter refuses it: then it counts as left out."""
        self._channels[trajectory.group.channel].ledger.ship((step,), step_filter)
        self._retire_step(trajectory, step)

    # -- rewards -------------------------------------------------------------------------------------------------------

    def set_reward(
        self,
        trajectory: Trajectory,
        value: float,
        source: str,
        *,
        parts: Mapping[str, float] | None = None,
        notes: str = "",
    ) -> None:
        """A judgement that a reward worker still owes comes too late from now on."""
        self._set_reward(trajectory, value, source)
        self._explain_reward(trajectory, parts, notes)
        self._changed(trajectory)
        self._rewarded(trajectory.group)

    def set_step_reward(
        self, trajectory: Trajectory, step: StoredStep, value: float, source: str, *, notes: str = ""
    ) -> None:
        step.reward, step.reward_source = value, source
        step.reward_revision += 1
        self._journal.save_step(step)
        trajectory.reward_lease = None  # a reward worker that has it did not see all of it
        if notes:
            self._explain_reward(trajectory, None, notes)
            self._journal.save_trajectory(trajectory)
        self.change_log.record(trajectory)
        self._update_rewards(trajectory)
        self._rewarded(trajectory.group)

    def relabel(self, trajectory: Trajectory, value: float, source: str, notes: str = "") -> None:
        """A person's reward replaces the trajectory's and its steps'. The trajectory may be under lease or trained."""
        trajectory.reward_revision = trajectory.revision
        for step in trajectory.scored_steps():
            step.reward, step.reward_source = None, ""
            self._journal.save_step(step)
        self._set_reward(trajectory, value, source)
        self._explain_reward(trajectory, None, notes)
        self._changed(trajectory)
        if trajectory.is_at_home:
            self._rewarded(trajectory.group)

    def count_late_reward(self, trajectory_uid: str) -> int:
        """The number of a reward for a trajectory that is handed out or gone."""
        known = self.trajectories.get(trajectory_uid)
        if known is not None:
            known.late_rewards += 1
            return known.revision
        self.closed[trajectory_uid] += 1
        self._journal.add_closed(trajectory_uid, self.closed[trajectory_uid])
        return self.closed[trajectory_uid]

    def lease_for_scoring(self, lease_uid: str, expires_at: float, trajectories: list[Trajectory]) -> None:
        self._rewards.lease_out(lease_uid, expires_at, trajectories)

    def settle_scoring(self, trajectory: Trajectory, outcome: JudgementOutcome) -> None:
        """A worker has judged it. It is offered to the next one unless it gets a reward, rests or is given up."""
        self._rewards.settle(trajectory)
        if outcome is JudgementOutcome.SCORE:
            self._counters.scored += 1
        else:
            self._counters.failed_judgements[outcome] += 1
            trajectory.failures += 1

    def rest_scoring(self, trajectory: Trajectory, until: float) -> None:
        self._rewards.rest(trajectory, until)

    def give_up_scoring(self, trajectory: Trajectory) -> None:
        """It stays without a reward and is not offered again."""
        self._rewards.give_up(trajectory)

    def count_late_judgement(self) -> None:
        self._counters.late_judgements += 1

    # -- leases --------------------------------------------------------------------------------------------------------

    def lease_out(self, lease: Lease) -> None:
        """Hand out the groups and steps of a new lease."""
        index = self._channels[lease.channel]
        for group in lease.groups:
            self._leave(group)
            index.begin_lease(group)
            group.lease = lease.uid
            self._counters.uniform_groups += group.attempts == 0 and group.is_uniform()
            self.change_log.record_all(group.trajectories.values())
            self._journal.save_group(group)
        for trajectory, step in lease.steps:
            index.hide_step(step)
            step.lease = lease.uid
            self.change_log.record(trajectory)
            self._journal.save_step(step)
        lease.version = self.policy_version
        index.last_taken = sum(len(group.trajectories) for group in lease.groups) or len(lease.steps)
        self._journal.save_lease(lease)
        self._add_lease(lease)

    def extend_lease(self, lease: Lease, expires_at: float) -> None:
        self._expiry.discard((lease.expires_at, lease.uid))
        lease.expires_at = expires_at
        self._expiry.add((expires_at, lease.uid))
        self._journal.save_lease(lease)

    def return_leased(self, lease: Lease, how: Settlement, *, attempted: bool = True) -> None:
        """Not trained: it goes back to the queue. What a person rejected meanwhile is dropped."""
        self._end_lease(lease, how)
        index = self._channels[lease.channel]
        for group in lease.groups:
            group.lease = None
            group.attempts += attempted
            index.end_lease(group)
            self._enter(group)
            self._journal.save_group(group)
            self._apply_pending_rejections(group)
        for trajectory, step in lease.steps:
            step.lease = None
            if self.holds(trajectory):
                self.change_log.record(trajectory)
                self._journal.save_step(step)
                index.show_step(trajectory, step)

    def mark_trained(self, lease: Lease) -> None:
        """Acknowledged: groups become history, steps are shipped."""
        self._end_lease(lease, Settlement.DONE)
        index = self._channels[lease.channel]
        for group in lease.groups:
            index.end_lease(group)
            self._train(group, lease.step_filter, lease.version)
        for trajectory, step in lease.steps:
            step.lease = None
            if self.holds(trajectory):
                self.ship_step(trajectory, step, lease.step_filter)

    def leave_out(self, group: Group, step_filter: StepFilter) -> None:
        """A consumer wants nothing of the group: it goes as if it were acknowledged."""
        self._leave(group)
        self._train(group, step_filter, self.policy_version)

    # -- people --------------------------------------------------------------------------------------------------------

    def reject_when_returned(self, trajectory: Trajectory, note: str) -> None:
        """A trainer has it. If it comes back, it is dropped."""
        trajectory.rejected = note
        self._changed(trajectory)

    def forget_history(self, trajectory: Trajectory, note: str) -> None:
        """A trained trajectory leaves the history."""
        self._remove_history(trajectory)
        self.change_log.end(trajectory, TrajectoryState.TRAINED, note=note)

    def record_audit(self, entry: AuditEntry) -> None:
        self.audit_trail.append(entry)
        self._journal.add_audit(entry)

    # -- recovery ------------------------------------------------------------------------------------------------------

    def recall(self, snapshot: Mapping[str, Any]) -> None:
        engines = snapshot.get("engines")
        self.serving = Serving(snapshot["policy_version"], None if engines is None else tuple(engines))
        self.gateways = tuple(snapshot.get("gateways", ()))
        self._counters = Counters(**snapshot["counters"])
        for name, unit in snapshot["units"].items():
            self._index(name).claim(unit and Unit(unit))
        for name, ledger in snapshot["ledgers"].items():
            self._index(name).ledger = load_ledger(ledger)

    def load(
        self,
        groups: Sequence[Group],
        leases: Mapping[str, Lease],
        *,
        closed: Iterable[tuple[str, int]],
        ended: Iterable[tuple[str, Settlement]],
        audit: Iterable[AuditEntry],
        damaged: bool,
    ) -> None:
        """Take over the records of a journal. The state is empty before.

        After damage no number is given twice, and held steps that were not found are counted as lost.
        """
        if damaged:
            self._counters.continue_after(groups)
        self.closed.update(closed)
        self.ended_leases.update(ended)
        self.audit_trail.extend(audit)
        for group in groups:
            self._load_group(group, leases)
        for lease in leases.values():
            lease.steps.sort(key=lambda leased: leased[1].number)
            lease.version = self.policy_version
            self._add_lease(lease)
        if damaged:
            for index in self._channels.values():
                leased = [lease.groups for lease in self.leases.values() if lease.channel == index.name]
                found = chain(index.groups.values(), *leased)
                index.ledger.repair(count_steps(step for group in found for step in group.held_steps()))

    # -- private -------------------------------------------------------------------------------------------------------

    def _set_reward(self, trajectory: Trajectory, value: float, source: str) -> None:
        trajectory.reward, trajectory.reward_source = value, source
        trajectory.reward_revision += 1
        trajectory.reward_lease = None

    def _explain_reward(self, trajectory: Trajectory, parts: Mapping[str, float] | None, notes: str) -> None:
        """Trainers find the explanation of a reward in the metadata."""
        explanation: dict[str, Json] = {}
        if parts:
            explanation["parts"] = dict(parts)
        if notes:
            explanation["notes"] = notes
        if explanation:
            trajectory.metadata = {**trajectory.metadata, "reward": explanation}

    def _apply_pending_rejections(self, group: Group) -> None:
        for trajectory in [found for found in group.trajectories.values() if found.rejected is not None]:
            self.drop_trajectory(trajectory, REJECTED, trajectory.rejected or "", frees_place=False)

    def _load_group(self, group: Group, leases: Mapping[str, Lease]) -> None:
        index = self._index(group.channel)
        group.nbytes = sum(trajectory.nbytes for trajectory in group.trajectories.values())
        if group.trained:
            for trajectory in group.trajectories.values():
                self.change_log.end(trajectory, TrajectoryState.TRAINED)
            self._keep_history(group)
            return
        for trajectory in group.trajectories.values():
            self.trajectories[trajectory.uid] = trajectory
            for step in trajectory.steps.values():
                if step.lease is not None and step.lease in leases:
                    leases[step.lease].steps.append((trajectory, step))
        lease = leases.get(group.lease) if group.lease is not None else None
        if lease is None:
            group.lease = None
            self._enter(group)
            if not group.trajectories:
                self._regrouped(group)
            self._apply_pending_rejections(group)
        else:
            lease.groups.append(group)
            index.begin_lease(group)
            self.change_log.record_all(group.trajectories.values())
