"""The pool's books: everything it holds, and the few ways in which that changes. Every change goes to the journal.

What always holds: a trajectory is in one group, a group in one channel or under one lease; what goes is counted under
its cause and its trajectories are remembered as closed.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stepwell.errors import BadRequest
from stepwell.pool.api.leasing import Unit
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.stats import StepCount
from stepwell.pool.api.watching import TrajectorySnapshot, TrajectoryState
from stepwell.pool.state.change_log import ChangeLog
from stepwell.pool.state.channel_index import ChannelIndex
from stepwell.pool.state.journal import StateJournal
from stepwell.pool.state.ledger import Ledger
from stepwell.pool.state.records import Group, Trajectory
from stepwell.pool.state.series import SeriesRecorder
from stepwell.pool.state.stored_step import StoredStep
from stepwell.steps.step import Json

REJECTED = "rejected"
"""The cause under which is dropped what a person does not want."""


@dataclass(slots=True)
class Counters:
    """Numbers that only grow."""

    opened: int = 0
    registered: int = 0
    arrived: int = 0
    submitted: int = 0
    forks: int = 0
    scored: int = 0
    late_judgements: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    quarantined: Counter[str] = field(default_factory=Counter)
    failed_judgements: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        """A snapshot has them as plain mappings."""
        for name in ("refused", "quarantined", "failed_judgements"):
            setattr(self, name, Counter(getattr(self, name)))


class PoolState:
    def __init__(self, limits: Limits, journal: StateJournal) -> None:
        self.limits = limits
        self.journal = journal
        self.now = 0.0
        self.policy_version = 0
        self.counters = Counters()
        self.channels: dict[str, ChannelIndex] = {}
        self.trajectories: dict[str, Trajectory] = {}
        """Open, complete or under lease."""
        self.history: dict[str, Trajectory] = {}
        """Trained, and kept for batches that mix new and old."""
        self.chronicle = ChangeLog(self.trajectories, limits.gone_kept)
        self.timeline = SeriesRecorder(self.channels)
        self.closed: OrderedDict[str, int] = OrderedDict()
        """The last that are gone, each with the number of the last reward given to it."""

    def channel(self, name: str) -> ChannelIndex:
        if name not in self.channels:
            if len(self.channels) >= self.limits.max_channels:
                raise BadRequest(f"channel {name!r} would be one too many: the pool has {len(self.channels)} already")
            self.channels[name] = ChannelIndex(name, self.limits, self.chronicle)
        return self.channels[name]

    def open_group(self, prompt_uid: str, channel: ChannelIndex, size: int, source: str = "") -> Group:
        self.counters.opened += 1
        seq = self.counters.opened
        wait = self.limits.group_deadline
        deadline = None if wait is None else self.now + wait
        group = Group(seq, seq, prompt_uid, channel.name, size, self.now, deadline, source=source)
        channel.enter(group)
        return group

    def join(self, group: Group, trajectory: Trajectory) -> None:
        channel = self.channels[group.channel]
        trajectory.group = group
        self.trajectories[trajectory.uid] = group.trajectories[trajectory.uid] = trajectory
        channel.trajectories += 1
        channel.place(group)
        self.chronicle.touch(trajectory)
        self.journal.save_group(group)
        self.journal.save_trajectory(trajectory)

    def take_out(self, trajectory: Trajectory) -> None:
        """Out of its group, which stays, with a free place, unless it was the last."""
        group = trajectory.group
        channel = self.channels[group.channel]
        channel.leave(group)
        del group.trajectories[trajectory.uid]
        group.nbytes -= sum(step.nbytes for step in trajectory.steps.values())
        if group.trajectories:
            channel.enter(group)
        else:
            self.journal.remove_group(group)

    def drop_trajectory(self, trajectory: Trajectory, cause: str, note: str = "") -> None:
        """It failed: its data is lost, its place in the group is free."""
        self.channels[trajectory.group.channel].ledger.drop(cause, trajectory.held_steps())
        self.take_out(trajectory)
        self.journal.remove_trajectory(trajectory)
        self.close(trajectory, TrajectoryState.DROPPED, cause, note)

    def drop_group(self, group: Group, cause: str, note: str = "") -> None:
        channel = self.channels[group.channel]
        channel.leave(group)
        channel.ledger.drop(cause, group.held_steps())
        self.journal.remove_group(group)
        for trajectory in group.trajectories.values():
            self.close(trajectory, TrajectoryState.DROPPED, cause, note)
        group.dissolve()

    def reject(self, trajectory: Trajectory, note: str) -> None:
        """A person does not want it: it goes, and its place with it, so that the others wait for no other."""
        group = trajectory.group
        self.shrink(group)
        self.drop_trajectory(trajectory, REJECTED, note)
        if group.trajectories:
            self.close_if_spent(group)

    def shrink(self, group: Group) -> None:
        """One of its rollouts goes and is not to be replaced."""
        group.give_up(1)
        self.journal.save_group(group)

    def clear(self, channel: ChannelIndex) -> int:
        """Drop every group that is not under lease; gives how many there were."""
        groups = list(channel.groups.values())
        for group in groups:
            self.drop_group(group, "cleared")
        return len(groups)

    def close_if_spent(self, group: Group) -> None:
        """A group whose steps were all taken one by one has nothing more to give."""
        channel = self.channels[group.channel]
        if channel.unit is Unit.STEPS and group.completed == group.size and not any(True for _ in group.held_steps()):
            channel.leave(group)
            self.journal.remove_group(group)
            for trajectory in group.trajectories.values():
                sketch = self.close(trajectory, TrajectoryState.TRAINED)
                self.timeline.seen(channel.name).add(sketch, self.policy_version)
            group.dissolve()

    def remember(self, channel: ChannelIndex, group: Group) -> None:
        """A trained group stays as history, if any is kept. What has to make room for it may leave for the archive."""
        leaving = channel.remember(group)
        if leaving is not group:
            self.history |= group.trajectories
            self.journal.save_group(group)
        if leaving is not None:
            if leaving is not group:
                for uid in leaving.trajectories:
                    self.history.pop(uid, None)
            self.journal.retire_group(leaving)

    def forget(self, trajectory: Trajectory) -> None:
        """Out of the history."""
        group, channel = trajectory.group, self.channels[trajectory.group.channel]
        self.history.pop(trajectory.uid, None)
        del group.trajectories[trajectory.uid]
        self.journal.remove_trajectory(trajectory)
        if not group.trajectories and group in channel.history:
            channel.history.remove(group)
            self.journal.remove_group(group)

    def make_room(self, channel: ChannelIndex, more_groups: int = 0) -> None:
        """Drop the oldest until the channel keeps to its bounds, with room for so many more groups."""
        while self._is_over(channel, more_groups) and (oldest := channel.oldest()) is not None:
            self.drop_group(oldest, "evicted")

    def reward(self, trajectory: Trajectory, value: float, source: str) -> None:
        """Whoever was about to score it is too late. Its group has to be placed anew."""
        trajectory.reward, trajectory.reward_source = value, source
        trajectory.reward_revision += 1
        trajectory.ticket = None
        self.chronicle.touch(trajectory)
        self.journal.save_trajectory(trajectory)

    def relabel(self, trajectory: Trajectory, value: float, source: str) -> None:
        """The one reward it has from now on, in place of its own and its steps'."""
        trajectory.reward_revision = trajectory.revision
        for step in trajectory.scored_steps():
            step.reward, step.reward_source = None, ""
            self.journal.save_step(step)
        self.reward(trajectory, value, source)

    def reward_step(self, trajectory: Trajectory, step: StoredStep, value: float, source: str) -> None:
        step.reward, step.reward_source = value, source
        step.reward_revision += 1
        self.chronicle.touch(trajectory)
        self.count_rewards_again(trajectory)
        self.journal.save_step(step)

    def hold_back(self, trajectory: Trajectory) -> None:
        """The rewards it has are all on steps that its consumer leaves out."""
        self.channels[trajectory.group.channel].hold_back(trajectory)
        self.journal.save_trajectory(trajectory)

    def count_rewards_again(self, trajectory: Trajectory) -> None:
        """It has changed: whoever was about to score it has not seen all of it, nor whoever held it back."""
        trajectory.ticket = None
        if trajectory.reward_left_out:
            trajectory.reward_left_out = False
            self.journal.save_trajectory(trajectory)

    def explain_reward(self, trajectory: Trajectory, **words: Json) -> None:
        """What is said of a reward beside its value goes where the trainer finds it."""
        said: dict[str, Json] = {name: value for name, value in words.items() if value}
        if said:
            trajectory.metadata = {**trajectory.metadata, "reward": said}
            self.journal.save_trajectory(trajectory)

    def count_late_reward(self, trajectory_uid: str) -> int:
        """The number of a reward for a trajectory that was handed out or is gone."""
        known = self.trajectories.get(trajectory_uid)
        if known is not None:
            known.late_rewards += 1
            return known.revision
        self.closed[trajectory_uid] += 1
        self.journal.add_closed(trajectory_uid, self.closed[trajectory_uid])
        return self.closed[trajectory_uid]

    def close(
        self, trajectory: Trajectory, state: TrajectoryState, cause: str = "", note: str = ""
    ) -> TrajectorySnapshot:
        """It is gone; what is left of it is its sketch."""
        uid = trajectory.uid
        self.trajectories.pop(uid, None)
        sketch = self.chronicle.end(trajectory, state, cause, note)
        self.closed[uid] = sketch.revision
        self.journal.add_closed(uid, sketch.revision)
        if len(self.closed) > self.limits.closed_kept:
            self.closed.popitem(last=False)
        return sketch

    def snapshot(self) -> dict[str, Any]:
        """The numbers, in plain values; `recall` takes them back."""
        counters = {name: getattr(self.counters, name) for name in Counters.__slots__}
        ledgers = {name: channel.ledger for name, channel in self.channels.items()}
        return {
            "policy_version": self.policy_version,
            "counters": counters,
            "units": {name: channel.unit for name, channel in self.channels.items()},
            "ledgers": {
                name: [
                    _plain(ledger.accepted),
                    _plain(ledger.shipped),
                    {c: _plain(t) for c, t in ledger.dropped.items()},
                    {k: _plain(t) for k, t in ledger.left_out.items()},
                ]
                for name, ledger in ledgers.items()
            },
        }

    def recall(self, snapshot: Mapping[str, Any]) -> None:
        self.policy_version = snapshot["policy_version"]
        self.counters = Counters(**snapshot["counters"])
        for name, unit in snapshot["units"].items():
            self.channel(name).unit = None if unit is None else Unit(unit)
        for name, (accepted, shipped, *named) in snapshot["ledgers"].items():
            tallies = ({key: StepCount(*tally) for key, tally in part.items()} for part in named)
            self.channel(name).ledger = Ledger(StepCount(*accepted), StepCount(*shipped), *tallies)

    def _is_over(self, channel: ChannelIndex, more_groups: int) -> bool:
        over_bytes = self.limits.max_bytes is not None and channel.nbytes > self.limits.max_bytes
        return over_bytes or len(channel) + more_groups > self.limits.max_queue_size


def _plain(tally: StepCount) -> list[int]:
    return [tally.steps, tally.tokens]
