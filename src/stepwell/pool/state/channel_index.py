"""One channel's queue: what is held, what of it is ready, and what a consumer of each unit would get next."""

import random
from collections import Counter, deque

from stepwell.pool.api.leasing import Unit
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.stats import ChannelStats
from stepwell.pool.state.change_log import ChangeLog
from stepwell.pool.state.ledger import Ledger
from stepwell.pool.state.priority_set import PrioritySet
from stepwell.pool.state.ready_by_size import ReadyBySize
from stepwell.pool.state.records import Group, Trajectory
from stepwell.pool.state.stored_step import StoredStep

FULL_AT = 0.9
"""The share of max_bytes from which on a channel that does not drop refuses new trajectories."""


class ChannelIndex:
    """Holds the groups that are not under lease. `place` after every change keeps the indexes true."""

    def __init__(self, name: str, limits: Limits, chronicle: ChangeLog) -> None:
        self.name = name
        self.ledger = Ledger()
        self.unit: Unit | None = None
        self.nbytes = 0
        self.lent = 0
        """Groups under lease, and their bytes."""
        self.lent_bytes = 0
        self.trajectories = 0
        self.completed = 0
        self.last_taken = 0
        """Trajectories in the last batch."""
        self.history: deque[Group] = deque()
        self.refills: dict[int, Group] = {}
        """Groups whose producers are asked for another rollout."""
        self.groups: dict[int, Group] = {}
        self.by_age: PrioritySet[tuple[int, int]] = PrioritySet()
        self.ready: PrioritySet[tuple[int, int]] = PrioritySet()
        self.shelves = ReadyBySize()
        """The ready groups once more, by source and size."""
        self.deadlines: PrioritySet[tuple[float, int]] = PrioritySet()
        self.ready_trajectories: PrioritySet[tuple[int, int, int, str]] = PrioritySet()
        self.ready_steps: PrioritySet[tuple[int]] = PrioritySet()
        self.unscored: PrioritySet[tuple[int, int, int, str]] = PrioritySet()
        """Trajectories that reward workers may take; none unless rewards are required."""
        self._steps: dict[int, tuple[Trajectory, StoredStep]] = {}
        self._joinable: dict[str, dict[int, Group]] = {}
        self._limits = limits
        self._chronicle = chronicle
        self._random = random.Random(name)

    def __len__(self) -> int:
        return len(self.groups)

    def joinable(self, prompt_uid: str) -> Group | None:
        """The oldest group of that prompt with room for one more trajectory."""
        groups = self._joinable.get(prompt_uid)
        return groups[min(groups)] if groups else None

    def has_room(self) -> bool:
        """For one more group, with some bytes to spare for the trajectories under way. What is lent may come back."""
        limits = self._limits
        if limits.max_bytes is not None and self.nbytes + self.lent_bytes >= FULL_AT * limits.max_bytes:
            return False
        return len(self.groups) + self.lent < limits.max_queue_size

    def oldest(self) -> Group | None:
        key = self.by_age.first()
        return None if key is None else self.groups[key[1]]

    def oldest_unfinished(self) -> Group | None:
        keys = self.by_age.smallest(min(len(self.ready) + 1, 1000))
        return next((self.groups[seq] for age, seq in keys if (age, seq) not in self.ready), None)

    # -- keeping the indexes -------------------------------------------------------------------------------------

    def enter(self, group: Group) -> None:
        """A new group, or one that comes back from a lease."""
        self.groups[group.seq] = group
        self.by_age.add(group.key)
        self.nbytes += group.nbytes
        self.trajectories += len(group.trajectories)
        self.completed += group.completed
        if group.trajectories:
            self._chronicle.touch_all(group.trajectories.values())
            self.place(group)
        if self._limits.require_reward:
            for trajectory in group.trajectories.values():
                self.queue_unscored(trajectory)

    def leave(self, group: Group) -> None:
        del self.groups[group.seq]
        self.by_age.discard(group.key)
        self.ready.discard(group.key)
        self.shelves.remove(group)
        if group.deadline is not None:
            self.deadlines.discard((group.deadline, group.seq))
            self.refills.pop(group.seq, None)
        self.nbytes -= group.nbytes
        self.trajectories -= len(group.trajectories)
        self.completed -= group.completed
        self._close_to_joining(group)
        if self.unscored:
            for trajectory in group.trajectories.values():
                self.unscored.discard(self.trajectory_key(trajectory))
        if self.unit is not Unit.GROUPS:
            for trajectory in group.trajectories.values():
                self._hide(trajectory)

    def place(self, group: Group) -> None:
        """Note where `group` stands now."""
        if group.can_join():
            self._joinable.setdefault(group.prompt_uid, {})[group.seq] = group
        else:
            self._close_to_joining(group)
        ready, was_ready = group.is_ready(require_reward=self._limits.require_reward), group.key in self.ready
        if ready:
            self.ready.add(group.key)
            self.shelves.put(group)
        elif was_ready:
            self.ready.discard(group.key)
            self.shelves.remove(group)
        if ready != was_ready:
            self._chronicle.touch_all(group.trajectories.values())
        if group.deadline is not None:
            (self.deadlines.discard if ready else self.deadlines.add)((group.deadline, group.seq))
            if not group.can_join():
                self.refills.pop(group.seq, None)
        if self.unit not in (None, Unit.GROUPS):
            for trajectory in group.trajectories.values():
                self._show(trajectory)

    def queue_unscored(self, trajectory: Trajectory) -> None:
        """Offer it to reward workers if it lacks a reward, else no longer; after every change to one trajectory."""
        if not self._limits.require_reward:
            return
        if trajectory.ticket is None and trajectory.lacks_reward():
            self.unscored.add(self.trajectory_key(trajectory))
        elif self.unscored:
            self.unscored.discard(self.trajectory_key(trajectory))

    def hold_back(self, trajectory: Trajectory) -> None:
        """It is not ready after all: the steps that have a reward are none that its consumer takes."""
        trajectory.reward_left_out = True
        self._chronicle.touch(trajectory)
        self._hide(trajectory)
        self.place(trajectory.group)
        self.queue_unscored(trajectory)

    def lend(self, group: Group) -> None:
        self.lent += 1
        self.lent_bytes += group.nbytes

    def take_back(self, group: Group) -> None:
        self.lent -= 1
        self.lent_bytes -= group.nbytes

    def consume_by(self, unit: Unit) -> None:
        """Index what a consumer of that unit would get; done once, when the first comes. Groups are indexed always."""
        self.unit = unit
        if unit is not Unit.GROUPS:
            for group in self.groups.values():
                self.place(group)
                self._chronicle.touch_all(group.trajectories.values())

    def show_step(self, trajectory: Trajectory, step: StoredStep) -> None:
        if self.unit is Unit.STEPS and step.is_held() and step.lease is None:
            scored = step.reward is not None or not self._limits.require_reward
            if scored or (trajectory.completed and trajectory.is_scored()):
                self.ready_steps.add((step.number,))
                self._steps[step.number] = (trajectory, step)

    def hide_step(self, step: StoredStep) -> None:
        self.ready_steps.discard((step.number,))
        self._steps.pop(step.number, None)

    def step(self, number: int) -> tuple[Trajectory, StoredStep]:
        return self._steps[number]

    def trajectory_key(self, trajectory: Trajectory) -> tuple[int, int, int, str]:
        return trajectory.group.age, trajectory.group.seq, trajectory.number, trajectory.uid

    def remember(self, group: Group) -> Group | None:
        """Keep a trained group as history; gives the one that has to make room for it, or the group itself."""
        if self._limits.history_size == 0:
            return group
        self.history.append(group)
        return self.history.popleft() if len(self.history) > self._limits.history_size else None

    def draw_history(self, count: int) -> list[Group]:
        return self._random.sample(list(self.history), min(count, len(self.history)))

    def stats(self) -> ChannelStats:
        return ChannelStats(
            groups=len(self.groups),
            ready_groups=len(self.ready),
            ready_by_source=Counter({source: sum(sizes.values()) for source, sizes in self.shelves.counts().items()}),
            trajectories=self.trajectories,
            nbytes=self.nbytes,
            history_groups=len(self.history),
            held=self.ledger.held(),
            accepted=self.ledger.accepted,
            shipped=self.ledger.shipped,
            dropped=self.ledger.dropped,
            left_out=self.ledger.left_out,
        )

    def _show(self, trajectory: Trajectory) -> None:
        if self.unit is Unit.STEPS:
            for step in trajectory.steps.values():
                self.show_step(trajectory, step)
        elif trajectory.completed and (trajectory.is_scored() or not self._limits.require_reward):
            self.ready_trajectories.add(self.trajectory_key(trajectory))

    def _hide(self, trajectory: Trajectory) -> None:
        self.ready_trajectories.discard(self.trajectory_key(trajectory))
        if self.unit is Unit.STEPS:
            for step in trajectory.steps.values():
                self.hide_step(step)

    def _close_to_joining(self, group: Group) -> None:
        groups = self._joinable.get(group.prompt_uid)
        if groups is not None and groups.pop(group.seq, None) is not None and not groups:
            del self._joinable[group.prompt_uid]
