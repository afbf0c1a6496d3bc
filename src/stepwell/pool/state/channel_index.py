"""One channel's queue: what is held, what of it is ready, and what a consumer of each unit gets next."""

import random
from collections import Counter, deque

from stepwell.pool.api.leasing import Order, ReadyCounts, Unit, UserLimit
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.stats import ChannelStats
from stepwell.pool.state.ledger import Ledger
from stepwell.pool.state.queues import PrioritySet, ProducerShares, ReadyBySize, ReadyQueue
from stepwell.pool.state.records import Group, Trajectory
from stepwell.pool.state.stored_step import StoredStep

FULL_AT = 0.9
"""From this share of max_bytes on, a channel that does not drop refuses new trajectories."""


class Channel:
    """The queue as rules read it. It holds the groups that are not under lease."""

    def __init__(self, name: str, limits: Limits) -> None:
        self.name = name
        self.ledger = Ledger()
        self.unit: Unit | None = None
        self.nbytes = 0
        self.leased_groups = 0
        self.leased_bytes = 0
        self.trajectories = 0
        self.completed = 0
        self.last_taken = 0
        """Trajectories in the last batch."""
        self.history: deque[Group] = deque()
        self.refills: dict[int, Group] = {}
        """Groups for which producers are asked for another rollout."""
        self.groups: dict[int, Group] = {}
        self.by_age: PrioritySet[tuple[int, int]] = PrioritySet()
        by_user = self._tells_users = limits.max_share_per_user is not None
        self.ready: ReadyQueue[tuple[int, int]] = ReadyQueue(by_user=by_user)
        self.by_size = ReadyBySize(by_user=by_user)
        """The ready groups, by source and size."""
        self.deadlines: PrioritySet[tuple[float, int]] = PrioritySet()
        self.ready_trajectories: ReadyQueue[tuple[int, int, int, str]] = ReadyQueue(by_user=by_user)
        self.ready_steps: ReadyQueue[tuple[int]] = ReadyQueue(by_user=by_user)
        self.producers = ProducerShares(limits)
        self._steps: dict[int, tuple[Trajectory, StoredStep]] = {}
        self._joinable: dict[str, dict[int, Group]] = {}
        self._limits = limits
        self._by_parts = False
        """Is it consumed by trajectories or steps?"""
        self._random = random.Random(name)
        self._moves = 0
        """Counts the groups that left or returned, and those of the history: they may change what a batch can have."""

    def __len__(self) -> int:
        return len(self.groups)

    def joinable(self, prompt_uid: str) -> Group | None:
        """The oldest group of that prompt that has room for one more trajectory."""
        groups = self._joinable.get(prompt_uid)
        return groups[min(groups)] if groups else None

    def is_ready(self, group: Group) -> bool:
        return group.key in self.ready

    def has_room(self) -> bool:
        """For one more group, with some bytes left for the running trajectories. Leased data may come back."""
        limits = self._limits
        if limits.max_bytes is not None and self.nbytes + self.leased_bytes >= FULL_AT * limits.max_bytes:
            return False
        return len(self.groups) + self.leased_groups < limits.max_queue_size

    def is_over(self, more_groups: int = 0) -> bool:
        """Would it be over its limits with that many more groups?"""
        return self._is_over_bytes() or len(self.groups) + more_groups > self._limits.max_queue_size

    def next_to_evict(self) -> Group | None:
        """The oldest group of the producer that holds the most, if one holds much; else the oldest group."""
        shares = self.producers
        key = shares.oldest_by_bytes() if self._is_over_bytes() else shares.oldest_by_groups()
        return self.oldest() if key is None else self.groups[key[1]]

    def oldest(self) -> Group | None:
        key = self.by_age.first()
        return None if key is None else self.groups[key[1]]

    def oldest_groups(self, count: int, order: Order, limit: UserLimit | None = None) -> list[Group]:
        """The oldest ready groups; in strict order the oldest groups, ready or not. With a limit, the oldest ready ones
        that it allows; in strict order those before the oldest unfinished group."""
        if limit is None:
            keys = (self.by_age if order is Order.STRICT else self.ready).smallest(count)
            return [self.groups[seq] for _, seq in keys]
        unfinished = self.oldest_unfinished() if order is Order.STRICT else None
        keys = self.ready.oldest(count, limit)
        return [self.groups[seq] for age, seq in keys if unfinished is None or (age, seq) < unfinished.key]

    def oldest_unfinished(self) -> Group | None:
        keys = self.by_age.smallest(min(len(self.ready) + 1, 1000))
        return next((self.groups[seq] for age, seq in keys if (age, seq) not in self.ready), None)

    def oldest_steps(self, count: int, limit: UserLimit | None = None) -> list[tuple[Trajectory, StoredStep]]:
        return [self._steps[number] for (number,) in self.ready_steps.oldest(count, limit)]

    def held_back(self, limit: UserLimit) -> dict[str, int]:
        """What is ready and more than a batch may have of a user, by user."""
        if self.unit is Unit.STEPS:
            return self.ready_steps.held_back(limit)
        return (self.ready_trajectories if self.unit is Unit.TRAJECTORIES else self.ready).held_back(limit)

    def overdue(self, now: float) -> Group | None:
        """The group whose deadline passed first, if any has."""
        first = self.deadlines.first()
        return self.groups[first[1]] if first is not None and first[0] <= now else None

    def _is_over_bytes(self) -> bool:
        return self._limits.max_bytes is not None and self.nbytes > self._limits.max_bytes

    def draw_history(self, count: int) -> list[Group]:
        return self._random.sample(list(self.history), min(count, len(self.history)))

    def foresee_history(self, count: int) -> list[Group]:
        """What `draw_history` will draw next."""
        chance = self._random.getstate()
        drawn = self.draw_history(count)
        self._random.setstate(chance)
        return drawn

    def ready_counts(self) -> ReadyCounts:
        groups, trajectories, steps = self.ready, self.ready_trajectories, self.ready_steps
        changes = self._moves + groups.changes + trajectories.changes + steps.changes
        return ReadyCounts(changes, len(groups), len(trajectories), len(steps), len(self.history))

    def stats(self) -> ChannelStats:
        return ChannelStats(
            groups=len(self.groups),
            ready_groups=len(self.ready),
            ready_by_source=Counter({source: sum(sizes.values()) for source, sizes in self.by_size.counts().items()}),
            trajectories=self.trajectories,
            nbytes=self.nbytes,
            history_groups=len(self.history),
            held=self.ledger.held(),
            accepted=self.ledger.accepted,
            shipped=self.ledger.shipped,
            dropped=self.ledger.dropped,
            left_out=self.ledger.left_out,
            recent=Counter(self.ledger.recent),
        )


class ChannelIndex(Channel):
    """The queue as PoolState changes it. `reindex` after each change to a group keeps the indexes true."""

    def add(self, group: Group) -> None:
        """A new group, or one that returns from a lease."""
        self.groups[group.seq] = group
        self.by_age.add(group.key)
        self.producers.add(group)
        self.nbytes += group.nbytes
        self.trajectories += len(group.trajectories)
        self.completed += group.completed
        if group.trajectories:
            self._moves += 1
            self.reindex(group)

    def remove(self, group: Group) -> None:
        del self.groups[group.seq]
        self._moves += 1
        self.by_age.discard(group.key)
        self.producers.remove(group)
        self.ready.discard(group.key)
        self.by_size.remove(group)
        if group.deadline is not None:
            self.deadlines.discard((group.deadline, group.seq))
            self.refills.pop(group.seq, None)
        self.nbytes -= group.nbytes
        self.trajectories -= len(group.trajectories)
        self.completed -= group.completed
        self._close_to_joining(group)
        if self._by_parts:
            for trajectory in group.trajectories.values():
                self.hide(trajectory)

    def note_joined(self, group: Group) -> None:
        """An open trajectory has joined a group that waited for it: it is no more ready than before."""
        if group.can_join():
            self._joinable.setdefault(group.prompt_uid, {})[group.seq] = group
        else:
            self._close_to_joining(group)
            self.refills.pop(group.seq, None)
        if group.deadline is not None:
            self.deadlines.add((group.deadline, group.seq))

    def reindex(self, group: Group) -> bool:
        """Note where `group` stands now. Returns whether it became ready or ceased to be."""
        key, can_join = group.key, group.can_join()
        if can_join:
            self._joinable.setdefault(group.prompt_uid, {})[group.seq] = group
        elif group.prompt_uid in self._joinable:
            self._close_to_joining(group)
        ready, was_ready = group.is_ready(require_reward=self._limits.require_reward), key in self.ready
        if ready:
            user = group.user if self._tells_users else ""
            self.ready.add(key, user)
            self.by_size.add(group, user)
        elif was_ready:
            self.ready.discard(key)
            self.by_size.remove(group)
        if group.deadline is not None:
            (self.deadlines.discard if ready else self.deadlines.add)((group.deadline, group.seq))
            if not can_join:
                self.refills.pop(group.seq, None)
        if self._by_parts:
            for trajectory in group.trajectories.values():
                self._show(trajectory)
        return ready is not was_ready

    def add_step(self, trajectory: Trajectory, step: StoredStep) -> None:
        self.ledger.accept(step)
        if self.unit is Unit.STEPS:
            self.show_step(trajectory, step)

    def grow(self, group: Group, nbytes: int) -> None:
        """The group has so many bytes more, or less."""
        self.nbytes += nbytes
        self.producers.grow(group, nbytes)

    def begin_lease(self, group: Group) -> None:
        """The group is not in the queue any more."""
        self.leased_groups += 1
        self.leased_bytes += group.nbytes

    def end_lease(self, group: Group) -> None:
        self.leased_groups -= 1
        self.leased_bytes -= group.nbytes

    def claim(self, unit: Unit | None) -> None:
        """Index what a consumer of that unit gets. This happens once, at the first fetch. Groups are always indexed."""
        self.unit = unit
        self._by_parts = unit in (Unit.TRAJECTORIES, Unit.STEPS)
        if self._by_parts:
            for group in self.groups.values():
                self.reindex(group)

    def show_step(self, trajectory: Trajectory, step: StoredStep) -> None:
        if self.unit is not Unit.STEPS:
            return
        scored = step.reward is not None or not self._limits.require_reward
        scored = scored or (trajectory.completed and trajectory.has_its_rewards())
        if scored and step.is_held() and step.lease is None:
            self.ready_steps.add((step.number,), trajectory.user if self._tells_users else "")
            self._steps[step.number] = (trajectory, step)
        else:
            self.hide_step(step)

    def hide_step(self, step: StoredStep) -> None:
        self.ready_steps.discard((step.number,))
        self._steps.pop(step.number, None)

    def hide(self, trajectory: Trajectory) -> None:
        self.ready_trajectories.discard(trajectory.key)
        if self.unit is Unit.STEPS:
            for step in trajectory.steps.values():
                self.hide_step(step)

    def keep_history(self, group: Group) -> Group | None:
        """Keep a trained group. Returns the group that must leave: the oldest, the group itself, or none."""
        if self._limits.history_size == 0:
            return group
        self.history.append(group)
        self._moves += 1
        return self.history.popleft() if len(self.history) > self._limits.history_size else None

    def _show(self, trajectory: Trajectory) -> None:
        if self.unit is Unit.STEPS:
            for step in trajectory.steps.values():
                self.show_step(trajectory, step)
        elif trajectory.completed and (trajectory.has_its_rewards() or not self._limits.require_reward):
            self.ready_trajectories.add(trajectory.key, trajectory.user if self._tells_users else "")
        elif trajectory.awaits_steps:
            self.ready_trajectories.discard(trajectory.key)

    def _close_to_joining(self, group: Group) -> None:
        groups = self._joinable.get(group.prompt_uid)
        if groups is not None and groups.pop(group.seq, None) is not None and not groups:
            del self._joinable[group.prompt_uid]
