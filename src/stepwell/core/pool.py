"""The pool's rules: who may submit what, when a group is ready, what goes first, what is dropped.

Pure: no clock, no waiting, no Ray; pool/actor.py is the shell around it. What always holds: a step is accepted once
and leaves once, shipped or dropped under a cause; a trajectory belongs to one group, a group to one channel; the cost
of an operation does not grow with what is queued.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from stepwell.core.channel import Channel
from stepwell.core.group import Group, Trajectory, stripped
from stepwell.core.limits import Limits
from stepwell.core.soundness import fault_kind
from stepwell.core.stats import PoolStats
from stepwell.core.step import JsonObject, Step
from stepwell.errors import BadRequest, Conflict, UnknownTrajectory

TRAIN = "train"
"""The channel of everything that does not say otherwise."""


class Verdict(StrEnum):
    """What became of a submitted step."""

    ACCEPTED = "accepted"
    QUARANTINED = "quarantined"
    DUPLICATE = "duplicate"
    LATE = "late"
    """Its trajectory was already shipped or dropped."""
    UNKNOWN = "unknown"
    """Its trajectory was never registered under that prompt_uid."""
    MIXED_INDEXES = "mixed_indexes"
    """It is indexed by its producer while its trajectory's other steps are not, or the other way round."""


class Ending(StrEnum):
    """What became of a trajectory that someone ended."""

    COMPLETED = "completed"
    ABORTED = "aborted"
    EMPTY = "empty"
    """It held nothing to train, so it was taken out of its group and its place is free again."""
    LATE = "late"
    """It had already been shipped or dropped."""


@dataclass(frozen=True, slots=True)
class Registration:
    """What is said about a trajectory before its first step. None leaves as it is, or takes the default."""

    trajectory_uid: str
    prompt_uid: str
    channel: str | None = None
    group_size: int | None = None
    metadata: JsonObject | None = None


class Pool:
    def __init__(self, limits: Limits) -> None:
        self.policy_version = 0
        self.quarantine: deque[Step] = deque(maxlen=limits.quarantine_kept)
        self._limits = limits
        self._channels: dict[str, Channel] = {}
        self._trajectories: dict[str, Trajectory] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()
        self._opened = 0
        self._submitted = 0
        self._refused: Counter[str] = Counter()
        self._quarantined: Counter[str] = Counter()

    # -- what producers do -------------------------------------------------------------------------------------------

    def knows(self, trajectory_uid: str, prompt_uid: str) -> bool:
        trajectory = self._trajectories.get(trajectory_uid)
        return trajectory is not None and trajectory.group.prompt_uid == prompt_uid

    def register(self, wanted: Registration) -> None:
        """Open a trajectory, or add to what is known of it. It may change channel until its first step."""
        if wanted.trajectory_uid in self._closed:
            raise Conflict(f"trajectory {wanted.trajectory_uid} was already shipped or dropped; start a new one")
        known = self._trajectories.get(wanted.trajectory_uid)
        if known is None:
            self._join(wanted)
        elif known.group.prompt_uid != wanted.prompt_uid:
            raise Conflict(f"trajectory {known.uid} belongs to prompt_uid {known.group.prompt_uid!r}")
        elif wanted.group_size not in (None, known.group.size):
            raise Conflict(f"trajectory {known.uid} is in a group of {known.group.size}, not {wanted.group_size}")
        else:
            metadata = {**known.metadata, **(wanted.metadata or {})}
            if wanted.channel in (None, known.group.channel):
                known.metadata = metadata
            else:
                self._move(known, replace(wanted, group_size=known.group.size, metadata=metadata))

    def submit(
        self, steps: Sequence[Step], *, channel: str | None = None, group_size: int | None = None
    ) -> list[Verdict]:
        """Take in steps, one verdict each. Sending a step again is harmless.

        With a channel, trajectories not yet registered are opened in it; without, their steps are refused, for a
        guess might let validation data into training.
        """
        if channel is not None:
            for step in steps:
                if step.trajectory_uid not in self._trajectories and step.trajectory_uid not in self._closed:
                    self._join(Registration(step.trajectory_uid, step.prompt_uid, channel, group_size))
        return [self._submit(step) for step in steps]

    def complete(self, trajectory_uid: str, prompt_uid: str, reward: float | None = None) -> Ending:
        """The rollout is over. Steps still on their way are taken until the group is shipped."""
        trajectory = self._find(trajectory_uid, prompt_uid)
        if trajectory is None:
            return Ending.LATE
        if reward is not None:
            trajectory.reward = reward
        if trajectory.completed:
            return Ending.COMPLETED
        if not trajectory.sound_steps():
            self._close(trajectory)
            return Ending.EMPTY
        trajectory.completed = True
        trajectory.group.completed += 1
        self._channels[trajectory.group.channel].place(trajectory.group)
        return Ending.COMPLETED

    def abort(self, trajectory_uid: str, prompt_uid: str) -> Ending:
        """The rollout failed: its steps are dropped and its place in the group is free for another."""
        trajectory = self._find(trajectory_uid, prompt_uid)
        if trajectory is None:
            return Ending.LATE
        if trajectory.completed:
            return Ending.COMPLETED
        self._channels[trajectory.group.channel].ledger.drop(Ending.ABORTED, trajectory.sound_steps())
        self._close(trajectory)
        return Ending.ABORTED

    # -- what consumers do -------------------------------------------------------------------------------------------

    def can_take(self, groups: int, channel: str) -> bool:
        return channel in self._channels and self._channels[channel].ready >= groups

    def take(self, groups: int, channel: str) -> list[list[Step]] | None:
        """The steps of the oldest ready groups, or None while fewer are ready."""
        if not self.can_take(groups, channel):
            return None
        queue = self._channels[channel]
        taken: list[list[Step]] = []
        for _ in range(groups):
            group = queue.take_ready()
            queue.ledger.shipped.add(group.sound_steps())
            taken.append(group.shipped())
            self._forget(group)
        return taken

    def waiting_for(self, groups: int, channel: str) -> str:
        """In words, what a consumer of that many groups waits for."""
        queue = self._channels.get(channel)
        if queue is None:
            known = ", ".join(sorted(self._channels)) or "none"
            return f"{groups} ready groups in channel {channel!r}, which has never had any (channels: {known})"
        text = f"{groups} ready groups in channel {channel!r}; {queue.ready} ready of {len(queue)} held"
        unfinished = queue.oldest_unfinished()
        if unfinished is not None:
            text += (
                f"; the oldest unfinished group, {unfinished.prompt_uid!r}, has {unfinished.completed} of "
                f"{unfinished.size} trajectories complete and {len(unfinished.trajectories)} started"
            )
        return text

    def stats(self) -> PoolStats:
        return PoolStats(
            policy_version=self.policy_version,
            channels={name: channel.stats() for name, channel in self._channels.items()},
            submitted=self._submitted,
            refused=self._refused.copy(),
            quarantined=self._quarantined.copy(),
        )

    # -- how -----------------------------------------------------------------------------------------------------------

    def _submit(self, step: Step) -> Verdict:
        self._submitted += 1
        trajectory = self._trajectories.get(step.trajectory_uid)
        refusal = self._refusal(step, trajectory)
        if refusal is not None or trajectory is None:
            verdict = refusal or Verdict.UNKNOWN
            self._refused[verdict] += 1
            return verdict
        if step.quarantine is not None:
            self._quarantined[fault_kind(step.quarantine)] += 1
            self.quarantine.append(step)
            trajectory.steps[step.identity] = stripped(step)
            return Verdict.QUARANTINED
        trajectory.steps[step.identity] = step
        self._channels[trajectory.group.channel].ledger.accepted.add([step])
        if step.is_last:
            self.complete(step.trajectory_uid, step.prompt_uid)
        return Verdict.ACCEPTED

    def _refusal(self, step: Step, trajectory: Trajectory | None) -> Verdict | None:
        if trajectory is None:
            return Verdict.LATE if step.trajectory_uid in self._closed else Verdict.UNKNOWN
        if trajectory.group.prompt_uid != step.prompt_uid:
            return Verdict.UNKNOWN
        if step.identity in trajectory.steps:
            return Verdict.DUPLICATE
        return None if trajectory.can_follow(step) else Verdict.MIXED_INDEXES

    def _find(self, trajectory_uid: str, prompt_uid: str) -> Trajectory | None:
        """The trajectory, or None if it is closed."""
        if self.knows(trajectory_uid, prompt_uid):
            return self._trajectories[trajectory_uid]
        if trajectory_uid in self._closed:
            return None
        raise UnknownTrajectory(
            f"no trajectory {trajectory_uid} of prompt_uid {prompt_uid} is registered; POST /init_trajectory first"
        )

    def _join(self, wanted: Registration) -> None:
        channel = self._channel(wanted.channel or TRAIN)
        group = self._seat(wanted, channel) or self._open(wanted, channel)
        trajectory = Trajectory(wanted.trajectory_uid, group, wanted.metadata or {})
        self._trajectories[trajectory.uid] = group.trajectories[trajectory.uid] = trajectory
        channel.trajectories += 1
        channel.place(group)

    def _move(self, known: Trajectory, wanted: Registration) -> None:
        if known.steps:
            raise Conflict(f"trajectory {known.uid} already has steps in channel {known.group.channel!r}")
        self._seat(wanted, self._channel(wanted.channel or TRAIN))  # raises before anything has changed
        self._remove(known)
        self._join(wanted)

    def _seat(self, wanted: Registration, channel: Channel) -> Group | None:
        """The group that is waiting for this trajectory, if there is one."""
        group = channel.joinable(wanted.prompt_uid)
        if group is not None and wanted.group_size not in (None, group.size):
            raise Conflict(f"group {group.prompt_uid!r} is one of {group.size} trajectories, not {wanted.group_size}")
        return group

    def _open(self, wanted: Registration, channel: Channel) -> Group:
        if len(channel) >= self._limits.max_queue_size:
            evicted = channel.remove_oldest()
            channel.ledger.drop("evicted", evicted.sound_steps())
            self._forget(evicted)
        self._opened += 1
        return Group(self._opened, wanted.prompt_uid, channel.name, wanted.group_size or self._limits.group_size)

    def _channel(self, name: str) -> Channel:
        if name not in self._channels:
            if len(self._channels) >= self._limits.max_channels:
                raise BadRequest(f"channel {name!r} would be one too many: the pool has {len(self._channels)} already")
            self._channels[name] = Channel(name)
        return self._channels[name]

    def _remove(self, trajectory: Trajectory) -> None:
        """Take an unfinished trajectory out of its group, and the group out of its queue if it was the last."""
        group, queue = trajectory.group, self._channels[trajectory.group.channel]
        del self._trajectories[trajectory.uid], group.trajectories[trajectory.uid]
        queue.trajectories -= 1
        if group.trajectories:
            queue.place(group)
        else:
            queue.remove_unfinished(group)

    def _close(self, trajectory: Trajectory) -> None:
        self._remove(trajectory)
        self._remember_closed(trajectory.uid)

    def _forget(self, group: Group) -> None:
        self._channels[group.channel].trajectories -= len(group.trajectories)
        for uid in group.trajectories:
            del self._trajectories[uid]
            self._remember_closed(uid)

    def _remember_closed(self, uid: str) -> None:
        self._closed[uid] = None
        if len(self._closed) > self._limits.closed_kept:
            self._closed.popitem(last=False)
