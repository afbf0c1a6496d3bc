"""What producers do: register trajectories, submit steps, give rewards, end rollouts."""

import math
from collections.abc import Sequence

from stepwell.errors import BadRequest, Conflict, PoolFull, StepwellError, TooLarge, UnknownTrajectory
from stepwell.pool.api.plan import Overflow
from stepwell.pool.api.producing import (
    DEADLINE,
    ENDED_BY,
    LAST_STEP,
    READ,
    TRAIN,
    UNFINISHED_REWARD,
    EndResult,
    RecordedTurn,
    Registration,
    RewardGiven,
    SubmitVerdict,
)
from stepwell.pool.state.call_operations import LATE, RANKS
from stepwell.pool.state.pool_state import PoolState
from stepwell.pool.state.queues import producer_of
from stepwell.pool.state.records import A_STEP, Group, Trajectory, json_bytes
from stepwell.pool.state.stored_step import NO_FIELDS, PackedSteps, StoredStep
from stepwell.steps.columns import Columns
from stepwell.steps.step import JsonObject
from stepwell.steps.trainable import UNSEEN

MAX_TRAJECTORY_SHARE = 1 / 4
"""The part of max_bytes that one trajectory may hold."""
MOVED = "moved"
"""Why a trajectory is not here any more: it joined a group of another shard."""


class Ingest:
    def __init__(self, state: PoolState) -> None:
        self._state = state

    def channel_if_open(self, trajectory_uid: str, prompt_uid: str) -> str | None:
        """The channel of an open trajectory, whose agent may call the model; None if it is not open."""
        trajectory = self._state.trajectories.get(trajectory_uid)
        if trajectory is None or trajectory.completed or not trajectory.is_at_home:
            return None
        return trajectory.group.channel if trajectory.group.prompt_uid == prompt_uid else None

    def channel_of(self, trajectory_uid: str, prompt_uid: str) -> str | None:
        """The channel of a trajectory that is held, open or ended."""
        trajectory = self._state.trajectories.get(trajectory_uid)
        if trajectory is None or trajectory.group.prompt_uid != prompt_uid:
            return None
        return trajectory.group.channel

    def turns(self, trajectory_uid: str, prompt_uid: str, replied: str) -> list[RecordedTurn]:
        """The sound steps of an open trajectory whose conversation has this digest; most often one or none."""
        trajectory = self._state.trajectories.get(trajectory_uid)
        if trajectory is None or self.channel_if_open(trajectory_uid, prompt_uid) is None:
            return []
        return [
            RecordedTurn(
                step.uid,
                trajectory.tokens.read(step.branch, step.tokens).copy(),
                step.finish_reason,
                step.lineage,
                _other_choices(trajectory, step),
            )
            for step in trajectory.held_steps()
            if step.lineage.get("replied") == replied
        ]

    def step_extras(self, trajectory_uid: str, prompt_uid: str, name: str) -> dict[str, JsonObject]:
        """What the sound steps of an open trajectory have under this name in their extras, by their uids."""
        trajectory = self._state.trajectories.get(trajectory_uid)
        if trajectory is None or self.channel_if_open(trajectory_uid, prompt_uid) is None:
            return {}
        steps = ((step.uid, step.extras.get(name)) for step in trajectory.held_steps())
        return {uid: found for uid, found in steps if found is not None}

    def is_elsewhere(self, registration: Registration) -> bool:
        """Must another shard be asked for it?"""
        channel = registration.channel or TRAIN if registration.opens else None
        return self._state.is_elsewhere(registration.trajectory_uid, registration.prompt_uid, channel)

    def register(self, registration: Registration) -> None:
        """Open a trajectory, or add to its metadata. It may change its channel until its first step.

        UnknownTrajectory if it is not there and the registration does not open it.
        """
        uid, prompt_uid, group_size = registration.trajectory_uid, registration.prompt_uid, registration.group_size
        self._state.tombstones.check(uid, prompt_uid, registration.metadata or {})
        known = self._state.trajectories.get(uid)
        if uid in self._state.closed or (known is not None and not known.is_at_home):
            raise Conflict(f"trajectory {uid} was already shipped or dropped; start a new one")
        if not registration.opens:
            self._find(uid, prompt_uid)
        if registration.metadata:
            self._check_room_for(registration.metadata, known, registration.channel)
        if known is None:
            self._open(registration)
        elif known.group.prompt_uid != prompt_uid:
            raise Conflict(f"trajectory {known.uid} belongs to prompt_uid {known.group.prompt_uid!r}")
        elif not known.group.is_of(group_size):
            raise Conflict(f"trajectory {known.uid} is in a group of {known.group.size}, not {group_size}")
        else:
            self._register_again(known, registration)

    def move(self, trajectory_uid: str, prompt_uid: str, to_prompt_uid: str) -> Registration:
        """An open trajectory without steps joins the group of another prompt. If another shard has such groups, it
        leaves this one. The registration opens it there, and repeats here what is so already."""
        moving = self._find(trajectory_uid, prompt_uid)
        if moving is None or moving.completed or moving.steps:
            raise Conflict(
                f"trajectory {trajectory_uid} has calls or has ended, and stays in its group; name the prompt_uid in "
                "POST /init_trajectory, or before the first call"
            )
        group, metadata = moving.group, moving.metadata
        self._state.tombstones.check(trajectory_uid, to_prompt_uid, metadata)
        size = None if group.size == self._state.limits.group_size else group.size
        if self._state.is_own(to_prompt_uid):
            joined = self._group_for(to_prompt_uid, group.channel, size, group.source, metadata)
            self._state.move_trajectory(moving, joined)
        else:
            self._state.drop_trajectory(moving, MOVED)
        return Registration(trajectory_uid, to_prompt_uid, group.channel, size, metadata, group.source)

    def submit(
        self, columns: Columns, *, channel: str | None = None, group_size: int | None = None
    ) -> list[SubmitVerdict]:
        """Store steps. One verdict per step. Sending a step again is harmless.

        With a channel, unknown trajectories are opened in it. Without one, their steps are refused: a guess might put
        validation data into training.
        """
        packed = PackedSteps(columns)
        return [self._submit(packed, i, channel, group_size) for i in range(len(packed))]

    def submit_groups(self, columns: Columns, registrations: Sequence[Registration]) -> list[SubmitVerdict]:
        """Register trajectories and store their steps. One verdict per step. Sending them again is harmless.

        A refused registration becomes the verdict of its steps and does not affect the others.
        """
        refusals: dict[str, SubmitVerdict] = {}
        for registration in registrations:
            if self.is_elsewhere(registration):
                continue  # so are its steps
            try:
                self.register(registration)
            except PoolFull:
                refusals[registration.trajectory_uid] = SubmitVerdict.FULL
            except TooLarge:
                refusals[registration.trajectory_uid] = SubmitVerdict.TOO_LARGE
            except StepwellError:  # the verdict of its steps says it: late, duplicate or unknown
                continue
        packed = PackedSteps(columns)
        return [
            self._refuse(refusals[uid]) if uid in refusals else self._submit(packed, i, None, None)
            for i, uid in enumerate(columns.trajectory_uids)
        ]

    def reward(self, reward: RewardGiven) -> bool:
        """Does it count? Not if the data is trained, or a person has given another reward. If a trainer has the data,
        the reward is kept, and counts if the data comes back."""
        _check_finite(reward.value)
        trajectory = self._find(reward.trajectory_uid, reward.prompt_uid) or self._under_lease(reward)
        if trajectory is None or trajectory.is_relabelled:
            return False
        step = None if reward.step_index is None else _rewarded_step(trajectory, reward.step_index)
        if step is not None and step.shipped:
            return False
        if not trajectory.is_at_home or (step is not None and step.lease is not None):
            self._state.keep_reward(trajectory, step, reward.value, reward.source, reward.notes)
            return False
        if step is None:
            self._state.set_reward(trajectory, reward.value, reward.source, notes=reward.notes)
        else:
            self._state.set_step_reward(trajectory, step, reward.value, reward.source, notes=reward.notes)
        return True

    def complete(
        self, trajectory_uid: str, prompt_uid: str, reward: float | None = None, failure: str = ""
    ) -> EndResult:
        """The rollout is over and closed to its agent. Steps of calls that began before are accepted for a while.

        A rollout without a sound step counts in its group by its reward, if a call of it was recorded, or if the policy
        failed.
        """
        trajectory = self._find(trajectory_uid, prompt_uid)
        if trajectory is None or _is_ended_by_deadline(trajectory):
            return EndResult.LATE
        if reward is not None:
            _check_finite(reward)
            reward = None if trajectory.is_relabelled else reward
        if failure:
            self._state.update_metadata(trajectory, {**trajectory.metadata, ENDED_BY: failure})
            self._read_last(trajectory)
        has_sound = any(step.quarantine is None for step in trajectory.steps.values())
        is_scored = reward is not None or trajectory.is_scored()
        if has_sound or (is_scored and (trajectory.steps or failure)):
            self._state.complete(trajectory, reward, "completion")
            return EndResult.COMPLETED
        if reward is not None:
            self._state.set_reward(trajectory, reward, "completion")
        self._state.drop_trajectory(trajectory, EndResult.EMPTY)
        return EndResult.EMPTY

    def mark_unseen(self, trajectory_uid: str, prompt_uid: str, step_uids: Sequence[str], reason: str) -> None:
        """What is known of who read these steps: UNSEEN or NOT_CONTINUED, or after all READ or CONTINUED. It changes
        nothing for steps that a trainer has or had; these are counted."""
        if reason not in RANKS:
            raise BadRequest(f"{reason!r} is no mark of a step; there are {', '.join(RANKS)}")
        trajectory = self._find(trajectory_uid, prompt_uid)
        if trajectory is None:
            self._state.count_mark(LATE, len(step_uids))
        else:
            self._state.mark_steps(trajectory, step_uids, reason)

    def abort(self, trajectory_uid: str, prompt_uid: str) -> EndResult:
        """The rollout failed: its steps are dropped, and another rollout can take its place in the group.

        A completed one can be aborted too until it is handed out.
        """
        trajectory = self._find(trajectory_uid, prompt_uid)
        if trajectory is None:
            return EndResult.LATE
        has_place = not _is_ended_by_deadline(trajectory)  # its group waits for no other any more
        self._state.drop_trajectory(trajectory, EndResult.ABORTED, frees_place=has_place)
        return EndResult.ABORTED

    def end_unfinished(self, group: Group, reward: float) -> None:
        """Complete the open rollouts of a group as failures. A rollout has its own reward for that, or gets this one;
        one that has been rewarded already keeps its reward."""
        for trajectory in [found for found in group.trajectories.values() if not found.completed]:
            own = trajectory.metadata.get(UNFINISHED_REWARD)
            given = float(own) if isinstance(own, int | float) and math.isfinite(own) else reward
            self._state.count_unfinished()
            self.complete(trajectory.uid, group.prompt_uid, given if trajectory.reward is None else None, DEADLINE)

    def _submit(self, packed: PackedSteps, i: int, channel: str | None, group_size: int | None) -> SubmitVerdict:
        state = self._state
        uid, prompt_uid = packed.columns.trajectory_uids[i], packed.columns.prompt_uids[i]
        trajectory = state.trajectories.get(uid)
        if trajectory is not None:
            refusal = self._refusal(trajectory, prompt_uid, packed, i)
            if refusal is not None:
                return self._refuse(refusal)
        else:
            found = self._open_for_step(uid, prompt_uid, channel, group_size)
            if isinstance(found, SubmitVerdict):
                return found if found is SubmitVerdict.ELSEWHERE else self._refuse(found)
            trajectory = found
        refusal = self._refusal_of_size(trajectory, packed, i)
        if refusal is not None:
            return self._refuse(refusal)
        if packed.columns.quarantine[i] is not None:
            state.quarantine_step(trajectory, packed, i)
            return SubmitVerdict.QUARANTINED
        state.add_step(trajectory, packed, i)
        if packed.is_last[i] and not trajectory.completed:
            state.complete(trajectory)
        if state.limits.max_bytes is not None and state.limits.overflow is Overflow.DROP_OLDEST:
            state.evict(state.channel_of(trajectory.group))
        return SubmitVerdict.ACCEPTED

    def _open_for_step(
        self, uid: str, prompt_uid: str, channel: str | None, group_size: int | None
    ) -> Trajectory | SubmitVerdict:
        """A trajectory for a step whose trajectory is not held, or why there is none."""
        state = self._state
        if state.tombstones.has_name(uid, prompt_uid):
            return SubmitVerdict.DELETED
        if self._state.is_elsewhere(uid, prompt_uid, channel):
            return SubmitVerdict.ELSEWHERE
        if uid in state.closed:
            return SubmitVerdict.LATE
        if channel is None:
            return SubmitVerdict.UNKNOWN
        try:
            return state.add_trajectory(self._group_for(prompt_uid, channel, group_size), uid, NO_FIELDS)
        except PoolFull:
            return SubmitVerdict.FULL

    def _refusal(self, trajectory: Trajectory, prompt_uid: str, packed: PackedSteps, i: int) -> SubmitVerdict | None:
        if trajectory.group.prompt_uid != prompt_uid:
            return SubmitVerdict.UNKNOWN
        if packed.identities[i] in trajectory.steps:
            return SubmitVerdict.DUPLICATE
        if not trajectory.is_at_home:
            return SubmitVerdict.LATE
        limits = self._state.limits
        if trajectory.completed and trajectory.is_closed_to(
            packed.started_at[i], packed.ages[i], self._state.pool_time, limits.completion_grace
        ):
            return SubmitVerdict.LATE
        return None if trajectory.can_follow(packed.indexes[i]) else SubmitVerdict.MIXED_INDEXES

    def _refusal_of_size(self, trajectory: Trajectory, packed: PackedSteps, i: int) -> SubmitVerdict | None:
        limits = self._state.limits
        if limits.max_bytes is None:
            return None
        more = packed.nbytes(i) + A_STEP
        if trajectory.nbytes + more > limits.max_bytes * MAX_TRAJECTORY_SHARE:
            return SubmitVerdict.TOO_LARGE
        if limits.overflow is not Overflow.REFUSE:
            return None
        channel = self._state.channel_of(trajectory.group)
        return SubmitVerdict.FULL if channel.nbytes + channel.leased_bytes + more > limits.max_bytes else None

    def _check_room_for(self, metadata: JsonObject, known: Trajectory | None, channel_name: str | None) -> None:
        """TooLarge or PoolFull if a trajectory, or its channel, cannot hold this metadata."""
        limits, size = self._state.limits, json_bytes(metadata)
        if limits.max_bytes is None:
            return
        most = int(limits.max_bytes * MAX_TRAJECTORY_SHARE)
        if (known.nbytes if known is not None else 0) + size > most:
            raise TooLarge(
                f"this metadata takes {size} bytes of the pool's memory, and one trajectory may hold {most}, a quarter "
                "of --max-bytes; store large fields elsewhere and send their names"
            )
        channel = self._state.channels.get(channel_name or (known.group.channel if known is not None else TRAIN))
        if channel is None or limits.overflow is not Overflow.REFUSE:
            return
        if channel.nbytes + channel.leased_bytes + size > limits.max_bytes:
            raise PoolFull(f"channel {channel.name!r} has no room for {size} bytes of metadata; try later")

    def _read_last(self, trajectory: Trajectory) -> None:
        """The answer in which the policy failed is trained: no later one has replaced it."""
        sound = [step.uid for _, step in trajectory.in_order() if step.quarantine is None]
        mark = trajectory.marks.get(sound[-1]) if sound else None
        if mark is not None and mark.name == UNSEEN:
            self._state.mark_steps(trajectory, sound[-1:], READ)

    def _refuse(self, verdict: SubmitVerdict) -> SubmitVerdict:
        self._state.count_refusal(verdict)
        return verdict

    def _find(self, trajectory_uid: str, prompt_uid: str) -> Trajectory | None:
        """The trajectory, or None if it is shipped or dropped."""
        known = self._state.trajectories.get(trajectory_uid)
        if known is not None and known.is_at_home and known.group.prompt_uid == prompt_uid:
            return known
        if trajectory_uid in self._state.closed or (known is not None and not known.is_at_home):
            return None
        if self._state.tombstones.has_name(trajectory_uid, prompt_uid):
            return None
        raise UnknownTrajectory(
            f"no trajectory {trajectory_uid} of prompt_uid {prompt_uid} is registered; POST /init_trajectory first"
        )

    def _under_lease(self, reward: RewardGiven) -> Trajectory | None:
        """A trajectory that a trainer has, in its group."""
        known = self._state.trajectories.get(reward.trajectory_uid)
        if known is None or known.group.lease is None or known.group.prompt_uid != reward.prompt_uid:
            return None
        return None if self._state.tombstones.has_name(known.uid, reward.prompt_uid) else known

    def _register_again(self, known: Trajectory, registration: Registration) -> None:
        if registration.channel not in (None, known.group.channel):
            if known.steps:
                raise Conflict(f"trajectory {known.uid} already has steps in channel {known.group.channel!r}")
            source = registration.source or known.group.source
            size, metadata = known.group.size, registration.metadata or NO_FIELDS
            group = self._group_for(known.group.prompt_uid, registration.channel, size, source, metadata)
            self._state.move_trajectory(known, group)
        self._state.update_metadata(known, {**known.metadata, **(registration.metadata or {})})

    def _open(self, registration: Registration) -> Trajectory:
        metadata, source = registration.metadata or NO_FIELDS, registration.source or ""
        group = self._group_for(
            registration.prompt_uid, registration.channel, registration.group_size, source, metadata
        )
        return self._state.add_trajectory(group, registration.trajectory_uid, metadata, registration.outcome)

    def _group_for(
        self,
        prompt_uid: str,
        channel_name: str | None,
        group_size: int | None,
        source: str = "",
        metadata: JsonObject = NO_FIELDS,
    ) -> Group:
        """The group that waits for a trajectory of that prompt, or a new one."""
        state = self._state
        channel = state.open_channel(channel_name or TRAIN)
        if state.limits.overflow is Overflow.DROP_OLDEST:
            state.evict(channel)
        group = channel.joinable(prompt_uid)
        if group is not None:
            if not group.is_of(group_size):
                raise Conflict(f"group {group.prompt_uid!r} is one of {group.size} trajectories, not {group_size}")
            return group
        if state.limits.overflow is Overflow.REFUSE and not channel.has_room():
            raise PoolFull(
                f"channel {channel.name!r} is full: {len(channel)} groups, {channel.nbytes} bytes; try later"
            )
        if not state.evict(channel, more_groups=1):
            raise PoolFull(f"channel {channel.name!r} is full of groups that are kept, and none can be evicted")
        size = group_size or state.limits.group_size
        return state.open_group(prompt_uid, channel, size, source, producer_of(metadata, source))


def _rewarded_step(trajectory: Trajectory, step_index: int) -> StoredStep:
    steps = dict(trajectory.in_order())
    step = trajectory.last_answer() if step_index == LAST_STEP else steps.get(step_index)
    if step is None or step.quarantine is not None:
        named = "" if step_index == LAST_STEP else f" {step_index}"
        raise Conflict(f"trajectory {trajectory.uid} has no step{named} to reward")
    return step


def _other_choices(trajectory: Trajectory, chosen: StoredStep) -> tuple[str, ...]:
    """The steps of a call share the moment of its beginning and the digest of its messages."""
    asked = chosen.lineage.get("asked")
    return tuple(
        step.uid
        for step in trajectory.steps.values()
        if step is not chosen and step.started_at == chosen.started_at and step.lineage.get("asked") == asked
    )


def _check_finite(reward: float) -> None:
    if not math.isfinite(reward):
        raise BadRequest(f"a reward is a finite number, not {reward}; leave it out where there is none")


def _is_ended_by_deadline(trajectory: Trajectory) -> bool:
    """Then its own end comes too late: otherwise its reward would depend on when a trainer takes the group."""
    return trajectory.completed and trajectory.metadata.get(ENDED_BY) == DEADLINE
