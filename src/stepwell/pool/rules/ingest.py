"""What producers do: register trajectories, submit steps, give rewards, end rollouts."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from stepwell.errors import BadRequest, Conflict, PoolFull, UnknownTrajectory
from stepwell.pool.api.plan import Overflow
from stepwell.pool.api.producing import TRAIN, EndResult, Registration, RewardGiven, SubmitVerdict
from stepwell.pool.state.channel_index import ChannelIndex
from stepwell.pool.state.pool_state import PoolState
from stepwell.pool.state.records import Group, Trajectory
from stepwell.pool.state.stored_step import PackedSteps, StoredStep
from stepwell.steps.columns import Columns, unpack
from stepwell.steps.soundness import fault_kind
from stepwell.steps.step import Step


class Ingest:
    def __init__(self, books: PoolState) -> None:
        self.quarantine: deque[Step] = deque(maxlen=books.limits.quarantine_kept)
        self._books = books

    def knows(self, trajectory_uid: str, prompt_uid: str) -> bool:
        trajectory = self._books.trajectories.get(trajectory_uid)
        return trajectory is not None and _is_at_home(trajectory) and trajectory.group.prompt_uid == prompt_uid

    def register(self, wanted: Registration) -> None:
        """Open a trajectory, or add to what is known of it. It may change channel until its first step."""
        known = self._books.trajectories.get(wanted.trajectory_uid)
        if wanted.trajectory_uid in self._books.closed or (known is not None and not _is_at_home(known)):
            raise Conflict(f"trajectory {wanted.trajectory_uid} was already shipped or dropped; start a new one")
        if known is None:
            self._join(wanted)
        elif known.group.prompt_uid != wanted.prompt_uid:
            raise Conflict(f"trajectory {known.uid} belongs to prompt_uid {known.group.prompt_uid!r}")
        elif not known.group.is_of(wanted.group_size):
            raise Conflict(f"trajectory {known.uid} is in a group of {known.group.size}, not {wanted.group_size}")
        else:
            self._register_again(known, wanted)

    def submit(
        self, columns: Columns, *, channel: str | None = None, group_size: int | None = None
    ) -> list[SubmitVerdict]:
        """Take in steps, one verdict each. Sending a step again is harmless.

        With a channel, trajectories not yet registered are opened in it; without, their steps are refused, for a
        guess might let validation data into training.
        """
        message = PackedSteps(columns)
        return [self._submit(message, i, channel, group_size) for i in range(len(message))]

    def submit_groups(self, columns: Columns, registrations: Sequence[Registration]) -> list[SubmitVerdict]:
        """Register trajectories and take in their steps, one verdict each. Sending them again is harmless.

        A registration that is refused becomes the verdict of its steps, so that it spoils nothing else.
        """
        no_room = set()
        for wanted in registrations:
            try:
                self.register(wanted)
            except PoolFull:
                no_room.add(wanted.trajectory_uid)
            except (BadRequest, Conflict):  # its steps tell: late, duplicate or unknown
                continue
        message = PackedSteps(columns)
        return [
            self._turn_away(SubmitVerdict.FULL) if uid in no_room else self._submit(message, i, None, None)
            for i, uid in enumerate(columns.trajectory_uids)
        ]

    def reward(self, reward: RewardGiven) -> bool:
        """Whether it counts: it was in time, and no person has given another by curation."""
        _check_is_number(reward.value)
        trajectory = self._find(reward.trajectory_uid, reward.prompt_uid)
        if trajectory is None or trajectory.is_relabelled:
            return False
        if reward.step_index is None:
            self._books.reward(trajectory, reward.value, reward.source)
        elif not self._reward_step(trajectory, reward):
            return False
        self._books.explain_reward(trajectory, notes=reward.notes)
        channel = self._books.channels[trajectory.group.channel]
        channel.place(trajectory.group)
        channel.queue_unscored(trajectory)
        return True

    def complete(self, trajectory_uid: str, prompt_uid: str, reward: float | None = None) -> EndResult:
        """The rollout is over. Steps still on their way are taken until the group is shipped."""
        trajectory = self._find(trajectory_uid, prompt_uid)
        if trajectory is None:
            return EndResult.LATE
        if reward is not None:
            _check_is_number(reward)
            if trajectory.reward is None or not trajectory.is_relabelled:
                self._books.reward(trajectory, reward, "completion")
        if not any(step.quarantine is None for step in trajectory.steps.values()):
            self._books.drop_trajectory(trajectory, EndResult.EMPTY)
            return EndResult.EMPTY
        self._complete(trajectory)
        return EndResult.COMPLETED

    def abort(self, trajectory_uid: str, prompt_uid: str) -> EndResult:
        """The rollout failed: its steps are dropped and its place in the group is free for another.

        That holds for a completed one too, until it is handed out: like its reward, its end can still change.
        """
        trajectory = self._find(trajectory_uid, prompt_uid)
        if trajectory is None:
            return EndResult.LATE
        self._books.drop_trajectory(trajectory, EndResult.ABORTED)
        return EndResult.ABORTED

    # -- how -----------------------------------------------------------------------------------------------------------

    def _submit(self, message: PackedSteps, i: int, channel: str | None, group_size: int | None) -> SubmitVerdict:
        books = self._books
        books.counters.submitted += 1
        uid, prompt_uid = message.columns.trajectory_uids[i], message.columns.prompt_uids[i]
        trajectory = books.trajectories.get(uid)
        if trajectory is None and channel is not None and uid not in books.closed:
            try:
                trajectory = self._join(Registration(uid, prompt_uid, channel, group_size))
            except PoolFull:
                return self._refuse(SubmitVerdict.FULL)
        if trajectory is None:
            return self._refuse(SubmitVerdict.LATE if uid in books.closed else SubmitVerdict.UNKNOWN)
        refusal = self._refusal(trajectory, prompt_uid, message, i)
        if refusal is not None:
            return self._refuse(refusal)
        return self._keep(trajectory, message, i)

    def _keep(self, trajectory: Trajectory, message: PackedSteps, i: int) -> SubmitVerdict:
        books = self._books
        books.counters.arrived += 1
        step = message.held(i, books.counters.arrived)
        if step.quarantine is not None:
            return self._put_aside(trajectory, step, message, i)
        if step.reward is not None and trajectory.is_relabelled:
            step.reward, step.reward_source = None, ""
        placement = trajectory.tokens.place(message.tokens(i))
        books.counters.forks += placement.is_fork
        step.branch = placement.branch
        step.nbytes = placement.added.nbytes + _nbytes(step)
        trajectory.steps[step.identity] = step
        books.count_rewards_again(trajectory)
        channel = books.channels[trajectory.group.channel]
        channel.ledger.accept(step)
        channel.nbytes += step.nbytes
        trajectory.group.nbytes += step.nbytes
        books.chronicle.touch(trajectory)
        books.journal.add_step(trajectory, step, placement)
        channel.show_step(trajectory, step)
        if message.is_last[i] or trajectory.completed:
            self._complete(trajectory)
        if books.limits.max_bytes is not None and books.limits.overflow is Overflow.DROP_OLDEST:
            books.make_room(channel)
        return SubmitVerdict.ACCEPTED

    def _complete(self, trajectory: Trajectory) -> None:
        channel = self._books.channels[trajectory.group.channel]
        if not trajectory.completed:
            trajectory.completed = True
            channel.completed += 1
            self._books.chronicle.touch(trajectory)
            if self._books.limits.require_reward:  # the others of its group may wait for something else from now on
                self._books.chronicle.touch_all(trajectory.group.trajectories.values())
            self._books.journal.save_trajectory(trajectory)
        channel.place(trajectory.group)
        channel.queue_unscored(trajectory)
        self._books.close_if_spent(trajectory.group)

    def _put_aside(self, trajectory: Trajectory, step: StoredStep, message: PackedSteps, i: int) -> SubmitVerdict:
        self._books.counters.quarantined[fault_kind(step.quarantine or "")] += 1
        self.quarantine.append(unpack(message.columns, copy=True)[i])
        step.prompt_length = step.response_length = 0
        step.logprobs = step.mask = None
        trajectory.steps[step.identity] = step
        self._books.chronicle.touch(trajectory)
        self._books.journal.add_step(trajectory, step, None)
        return SubmitVerdict.QUARANTINED

    def _refusal(self, trajectory: Trajectory, prompt_uid: str, message: PackedSteps, i: int) -> SubmitVerdict | None:
        if trajectory.group.prompt_uid != prompt_uid:
            return SubmitVerdict.UNKNOWN
        if message.identity(i) in trajectory.steps:
            return SubmitVerdict.DUPLICATE
        if not _is_at_home(trajectory):
            return SubmitVerdict.LATE
        if not trajectory.can_follow(message.index(i)):
            return SubmitVerdict.MIXED_INDEXES
        limits, channel = self._books.limits, self._books.channels[trajectory.group.channel]
        if limits.overflow is not Overflow.REFUSE or limits.max_bytes is None:
            return None
        return (
            SubmitVerdict.FULL if channel.nbytes + channel.lent_bytes + message.nbytes(i) > limits.max_bytes else None
        )

    def _turn_away(self, verdict: SubmitVerdict) -> SubmitVerdict:
        """Without a look at it."""
        self._books.counters.submitted += 1
        return self._refuse(verdict)

    def _refuse(self, verdict: SubmitVerdict) -> SubmitVerdict:
        self._books.counters.refused[verdict] += 1
        return verdict

    def _find(self, trajectory_uid: str, prompt_uid: str) -> Trajectory | None:
        """The trajectory, or None if it was shipped or dropped."""
        if self.knows(trajectory_uid, prompt_uid):
            return self._books.trajectories[trajectory_uid]
        known = self._books.trajectories.get(trajectory_uid)
        if trajectory_uid in self._books.closed or (known is not None and not _is_at_home(known)):
            return None
        raise UnknownTrajectory(
            f"no trajectory {trajectory_uid} of prompt_uid {prompt_uid} is registered; POST /init_trajectory first"
        )

    def _register_again(self, known: Trajectory, wanted: Registration) -> None:
        metadata = {**known.metadata, **(wanted.metadata or {})}
        if wanted.channel not in (None, known.group.channel):
            if known.steps:
                raise Conflict(f"trajectory {known.uid} already has steps in channel {known.group.channel!r}")
            source = wanted.source or known.group.source
            moved = replace(wanted, group_size=known.group.size, source=source)
            channel = self._books.channel(wanted.channel or TRAIN)
            group = self._group_for(moved, channel)  # raises before anything has changed
            self._books.take_out(known)
            self._books.join(group, known)
        known.metadata = metadata
        self._books.chronicle.touch(known)
        self._books.journal.save_trajectory(known)

    def _join(self, wanted: Registration) -> Trajectory:
        group = self._group_for(wanted, self._books.channel(wanted.channel or TRAIN))
        self._books.counters.registered += 1
        trajectory = Trajectory(wanted.trajectory_uid, group, wanted.metadata or {}, self._books.counters.registered)
        self._books.join(group, trajectory)
        return trajectory

    def _group_for(self, wanted: Registration, channel: ChannelIndex) -> Group:
        """The group that is waiting for this trajectory, or a new one."""
        group = channel.joinable(wanted.prompt_uid)
        if group is not None:
            if not group.is_of(wanted.group_size):
                raise Conflict(
                    f"group {group.prompt_uid!r} is one of {group.size} trajectories, not {wanted.group_size}"
                )
            return group
        if self._books.limits.overflow is Overflow.REFUSE and not channel.has_room():
            raise PoolFull(
                f"channel {channel.name!r} is full: {len(channel)} groups, {channel.nbytes} bytes; try later"
            )
        self._books.make_room(channel, more_groups=1)
        size = wanted.group_size or self._books.limits.group_size
        return self._books.open_group(wanted.prompt_uid, channel, size, wanted.source or "")

    def _reward_step(self, trajectory: Trajectory, reward: RewardGiven) -> bool:
        step = dict(trajectory.in_order()).get(reward.step_index or 0)
        if step is None or step.quarantine is not None:
            raise Conflict(f"trajectory {trajectory.uid} has no step {reward.step_index} to reward")
        if step.shipped or step.lease is not None:
            return False
        self._books.reward_step(trajectory, step, reward.value, reward.source)
        return True


def _check_is_number(reward: float) -> None:
    if not math.isfinite(reward):
        raise BadRequest(f"a reward is a finite number, not {reward}; leave it out where there is none")


def _is_at_home(trajectory: Trajectory) -> bool:
    """Neither under lease nor trained: it can still change."""
    return trajectory.group.lease is None and not trajectory.group.trained


def _nbytes(step: StoredStep) -> int:
    nbytes = 0 if step.logprobs is None else step.logprobs.nbytes
    return nbytes if step.mask is None else nbytes + step.mask.nbytes
