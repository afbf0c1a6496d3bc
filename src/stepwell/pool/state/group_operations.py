"""Operations on groups, trajectories, steps and their rewards, and on trajectories that reward workers judge."""

from collections.abc import Collection, Mapping

from stepwell.pool.api.leasing import Unit
from stepwell.pool.api.scoring import JudgementOutcome
from stepwell.pool.api.sessions import RETENTION, may_train, session_id_of
from stepwell.pool.api.watching import TrajectoryState
from stepwell.pool.state.call_operations import CallOperations
from stepwell.pool.state.channel_index import Channel
from stepwell.pool.state.queues import producer_of
from stepwell.pool.state.records import (
    A_STEP,
    EXPLANATION,
    OUTCOME,
    STEP_DETAILS,
    Group,
    KeptReward,
    Trajectory,
    json_bytes,
)
from stepwell.pool.state.stored_step import PackedSteps, StoredStep
from stepwell.steps.returns import GivenReward
from stepwell.steps.step import Json, JsonObject
from stepwell.steps.trainable import NO_CONSENT, StepFilter, fault_kind

AWAKE = 1_024
"""Complete trajectories that are not packed, because they were completed or read last."""
MET_AT_ONCE = 8
"""Oldest groups that are looked at first for one that may be evicted."""
EVICTED = "evicted"
HELD_MOST = "its producer held the most of it"
"""Why an evicted group was not the oldest one."""
NOT_TO_BE_TRAINED = f"{NO_CONSENT}: whose data it is did not agree to training"
ABSTAINED = "abstained"
"""How a judgement ends that gives a trajectory no reward at all, because there is no evidence."""


class GroupOperations(CallOperations):
    # -- groups and trajectories ---------------------------------------------------------------------------------------

    def open_group(self, prompt_uid: str, channel: Channel, size: int, source: str = "", producer: str = "") -> Group:
        self._counters.opened += 1
        seq = self._counters.opened
        wait = None if session_id_of(prompt_uid) else self.limits.group_deadline
        deadline = None if wait is None else self.pool_time + wait
        group = Group(seq, seq, prompt_uid, channel.name, size, self.now, deadline, source=source, producer=producer)
        self._channels[channel.name].add(group)
        self._journal.save_group(group)
        return group

    def add_trajectory(
        self, group: Group, uid: str, metadata: JsonObject, outcome: GivenReward | None = None
    ) -> Trajectory:
        self._counters.registered += 1
        trajectory = Trajectory(uid, group, metadata, self._counters.registered)
        if outcome is not None:
            trajectory.reward, trajectory.reward_source = outcome.value, outcome.source
            trajectory.reward_revision = outcome.revision
        trajectory.nbytes = trajectory.held_bytes()
        self._join(group, trajectory)
        return trajectory

    def move_trajectory(self, trajectory: Trajectory, group: Group) -> None:
        """To another group. It has no steps yet."""
        self._take_out(trajectory)
        self._join(group, trajectory)

    def update_metadata(self, trajectory: Trajectory, metadata: JsonObject) -> None:
        """Replaces the metadata. If the trajectory is leased or trained, only marks may change: they take no bytes
        that are counted."""
        self._grow(trajectory, json_bytes(metadata) - json_bytes(trajectory.metadata))
        trajectory.metadata = metadata
        self.has_retention |= RETENTION in metadata
        self._changed(trajectory)

    def touch_session(self, trajectory: Trajectory) -> None:
        """Its session is called. Nothing happens if it belongs to none."""
        self.sessions.touch(trajectory.uid, self.pool_time)

    def count_unfinished(self) -> None:
        """A rollout was open at its group's deadline."""
        self._counters.unfinished += 1

    def count_idle_end(self) -> None:
        self._counters.idle_ends += 1

    def complete(self, trajectory: Trajectory, reward: float | None = None, source: str = "") -> None:
        """The rollout is over. Doing it again is harmless, and may bring another reward."""
        group, is_new = trajectory.group, not trajectory.completed
        if reward is not None:
            if trajectory.reward is None:
                self._note_first_reward(trajectory, reward)
            trajectory.set_reward(reward, source)
        if is_new:
            trajectory.completed, trajectory.completed_at = True, self.now
            trajectory.completed_time = self.pool_time
            if trajectory.calls is not None and not trajectory.calls.gateways:
                trajectory.calls = None
            self._packer.awake.append(trajectory.uid)
            self._count_bytes(trajectory)
            self._channels[group.channel].completed += 1
            self.sessions.end(trajectory.uid)
            if self._rewards.by_step:
                self._rewards.note_growth(trajectory)
        if is_new or reward is not None:
            self._changed(trajectory)
        if is_new and self.limits.require_reward:  # the others of its group may wait for something else from now on
            self.change_log.record_all(group.trajectories.values())
        self._regrouped(group)
        self._close_if_spent(group)

    def pack_at_rest(self, awake: int = AWAKE) -> None:
        """Pack complete trajectories that were not used lately, all but the last so many. Call it when all changes are
        in the journal."""
        for _ in range(len(self._packer.awake) - awake):
            trajectory = self.trajectories.get(self._packer.awake.popleft())
            if trajectory is None or self._channels[trajectory.group.channel].unit is Unit.STEPS:
                continue
            if not trajectory.is_packed and trajectory.is_small:
                trajectory.pack(self._packer)

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

    def evict(self, channel: Channel, more_groups: int = 0) -> bool:
        """Drop groups until the channel is within its limits, with room for that many more. False if it has only groups
        left that slices keep."""
        while channel.is_over(more_groups):
            group = self._next_to_evict(channel)
            if group is None:
                return False
            self.drop_group(group, EVICTED, "" if group is channel.oldest() else HELD_MOST)
        return True

    def _next_to_evict(self, channel: Channel) -> Group | None:
        """Returns the group that the channel evicts next; if slices keep it, the oldest group that they do not keep."""
        group, count = channel.next_to_evict(), MET_AT_ONCE
        while group is not None and self.why_kept(group):
            oldest = [channel.groups[seq] for _, seq in channel.by_age.smallest(count)]
            group = next((found for found in oldest if not self.why_kept(found)), group)
            if len(oldest) < count and self.why_kept(group):
                return None
            count *= 4
        return group

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
        alone.producer = producer_of(trajectory.metadata, group.source)
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
        if not may_train(trajectory.metadata):
            step.untrainable = NOT_TO_BE_TRAINED
        self._mark_arrived(trajectory, step)
        self._call_arrived(trajectory, step.uid)
        if step.reward is not None and trajectory.is_relabelled:
            step.reward, step.reward_source = None, ""
        placement = trajectory.tokens.place(packed.tokens(i))
        counters.forks += placement.is_fork
        step.branch = placement.branch
        nbytes = placement.added.nbytes
        if step.logprobs is not None:
            nbytes += step.logprobs.nbytes
        if step.mask is not None:
            nbytes += step.mask.nbytes
        step.nbytes = nbytes
        trajectory.steps[step.identity] = step
        if trajectory.lost_calls:
            self._mark_incomplete(trajectory)
        self._count_bytes(trajectory, step)
        self._channels[group.channel].add_step(trajectory, step)
        self._journal.add_step(trajectory, step, placement)
        self.sessions.add_step(trajectory, step, self.pool_time)
        if step.reward is not None:
            self._note_first_reward(trajectory, step.reward, step)
        self._rewards.note_growth(trajectory)
        self.change_log.record(trajectory)
        if self._rewards.by_step and not trajectory.completed:
            self._update_rewards(trajectory)
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
        self._call_arrived(trajectory, step.uid)
        step.prompt_length = step.response_length = 0
        step.logprobs = step.mask = None
        trajectory.steps[step.identity] = step
        self._count_bytes(trajectory, step)
        self.change_log.record(trajectory)
        self._journal.add_step(trajectory, step, None)

    def _count_bytes(self, trajectory: Trajectory, added: StoredStep | None = None) -> None:
        """It has one step more, or is complete."""
        more = added.nbytes + A_STEP if added is not None else 0
        if trajectory.completed:
            more = trajectory.held_bytes() - trajectory.nbytes
        self._grow(trajectory, more)

    def _grow(self, trajectory: Trajectory, more: int) -> None:
        """It has so many bytes more, or less."""
        if not more:
            return
        trajectory.nbytes += more
        trajectory.group.nbytes += more
        self._channels[trajectory.group.channel].grow(trajectory.group, more)

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
        is_rest: bool = False,
    ) -> None:
        """`is_rest`: it is what the rewards of the single steps leave over, and says nothing of a version by itself."""
        if trajectory.reward is None and not is_rest:
            self._note_first_reward(trajectory, value)
        trajectory.set_reward(value, source)
        _explain_reward(trajectory, parts, notes)
        self._changed(trajectory)
        self._rewarded(trajectory.group)

    def set_step_reward(
        self,
        trajectory: Trajectory,
        step: StoredStep,
        value: float,
        source: str,
        *,
        notes: str = "",
        details: Mapping[str, str] | None = None,
    ) -> None:
        """The evidence of an earlier reward is removed."""
        if step.reward is None and step.reward_revision == 0:
            self._note_first_reward(trajectory, value, step)
        step.reward, step.reward_source = value, source
        step.reward_revision += 1
        self._journal.save_step(step)
        self._rewards.note_growth(trajectory)
        if notes:
            _explain_reward(trajectory, None, notes)
        is_explained = trajectory.explain_step(step, details)
        if notes or is_explained:
            self._journal.save_trajectory(trajectory)
        self.change_log.record(trajectory)
        self._update_rewards(trajectory)
        self._rewarded(trajectory.group)

    def abstain_from_step(self, trajectory: Trajectory, step: StoredStep, details: Mapping[str, str]) -> None:
        """A reward worker gives it no reward, and says why."""
        self._counters.abstained_steps += 1
        trajectory.explain_step(step, details)
        self._journal.save_trajectory(trajectory)
        self.change_log.record(trajectory)

    def keep_reward(
        self, trajectory: Trajectory, step: StoredStep | None, value: float, source: str, notes: str
    ) -> None:
        """A trainer has the trajectory, or this step of it: the reward counts if that comes back."""
        of = OUTCOME if step is None else step.identity
        others = (kept for kept in trajectory.kept_rewards if kept.identity != of)
        trajectory.kept_rewards = (*others, KeptReward(of, value, source, notes))
        self._journal.save_trajectory(trajectory)

    def relabel(self, trajectory: Trajectory, value: float, source: str, notes: str = "") -> None:
        """A person's reward replaces the trajectory's and its steps'. The trajectory may be under lease or trained."""
        if not trajectory.is_scored():
            self._note_first_reward(trajectory, value)
        trajectory.reward_revision, trajectory.kept_rewards = trajectory.revision, ()
        for step in trajectory.scored_steps():
            step.reward, step.reward_source = None, ""
            step.reward_revision = max(1, step.reward_revision)  # it had a reward: the next one is not its first
            self._journal.save_step(step)
        trajectory.set_reward(value, source)
        _explain_reward(trajectory, None, notes)
        self._changed(trajectory)
        if trajectory.is_at_home:
            self._rewarded(trajectory.group)

    def count_late_reward(self, trajectory_uid: str) -> int:
        """The number of a reward for a trajectory that is handed out or gone."""
        known = self.trajectories.get(trajectory_uid)
        if known is not None:
            known.late_rewards += 1
            self._journal.save_trajectory(known)
            return known.revision
        self.closed[trajectory_uid] += 1
        subject = self.closed_subjects.get(trajectory_uid, "")
        self._journal.add_closed(trajectory_uid, self.closed[trajectory_uid], subject)
        return self.closed[trajectory_uid]

    # -- reward workers ------------------------------------------------------------------------------------------------

    def lease_for_scoring(self, lease_uid: str, expires_at: float, trajectories: list[Trajectory]) -> None:
        self._rewards.lease_out(lease_uid, expires_at, trajectories)

    def end_scoring(self, lease_uid: str) -> None:
        """Its worker is dead: what it has not judged is offered again."""
        self._rewards.end_lease(lease_uid)

    def judge_by_step(self, by_step: bool) -> None:
        """Whether reward workers judge single steps, of open trajectories too, or whole trajectories."""
        if self._rewards.by_step == by_step or not self.limits.require_reward:
            return
        self._rewards.by_step = by_step
        for trajectory in self.trajectories.values():
            self._rewards.update(trajectory)
        for channel in self._channels.values():
            for group in channel.groups.values():
                self._regrouped(group)
                self.change_log.record_all(group.trajectories.values())

    def settle_scoring(self, trajectory: Trajectory) -> None:
        """A worker has judged it. It is offered to the next one if it has no reward, or has grown since."""
        self._rewards.settle(trajectory)
        self.change_log.record(trajectory)
        self._rewarded(trajectory.group)

    def fail_scoring(self, trajectory: Trajectory, outcome: JudgementOutcome) -> None:
        """A worker could not judge it. It is offered to the next one unless it rests or is given up."""
        self._rewards.settle(trajectory, failed=True)
        self._counters.failed_judgements[outcome] += 1
        trajectory.failures += 1

    def count_scored(self) -> None:
        self._counters.scored += 1

    def count_abstention(self) -> None:
        self._counters.failed_judgements[ABSTAINED] += 1

    def rest_scoring(self, trajectory: Trajectory, until: float) -> None:
        self._rewards.rest(trajectory, until)

    def give_up_scoring(self, trajectory: Trajectory) -> None:
        """It stays without a reward and is not offered again."""
        self._rewards.give_up(trajectory)
        self.change_log.record(trajectory)
        self._rewarded(trajectory.group)

    def count_late_judgement(self) -> None:
        self._counters.late_judgements += 1


def _explain_reward(trajectory: Trajectory, parts: Mapping[str, float] | None, notes: str) -> None:
    """Trainers find the explanation of a reward in the metadata."""
    explanation: dict[str, Json] = {}
    if parts:
        explanation["parts"] = dict(parts)
    if notes:
        explanation["notes"] = notes
    if explanation:
        if steps := trajectory.step_details:
            explanation[STEP_DETAILS] = {name: dict(details) for name, details in steps.items()}
        trajectory.metadata = {**trajectory.metadata, EXPLANATION: explanation}
