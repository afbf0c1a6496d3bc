"""What PoolState holds, how rules read it, and the helpers in which its operations end.

The helpers keep journal, change log, indexes, ledgers, time series and reward queue true to the records.
"""

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

from stepwell.errors import BadRequest
from stepwell.pool.api.leasing import Settlement, Unit
from stepwell.pool.api.plan import FIRST_REVISION, Layout, Limits
from stepwell.pool.api.policy import DECISIONS_KEPT, PolicyDecision, Serving, VersionReward
from stepwell.pool.api.sessions import RETENTION, may_keep
from stepwell.pool.api.staleness import Present
from stepwell.pool.api.stats import PoolStats, ScoringStats, SessionStats
from stepwell.pool.api.watching import TrajectorySnapshot, TrajectoryState
from stepwell.pool.state.change_log import ChangeLog, note_of
from stepwell.pool.state.channel_index import Channel, ChannelIndex
from stepwell.pool.state.journal import StateJournal
from stepwell.pool.state.ledger import Counters, Ledger, dump_serving
from stepwell.pool.state.queues import PrioritySet
from stepwell.pool.state.records import Group, Lease, Trajectory
from stepwell.pool.state.reward_queue import RewardQueue
from stepwell.pool.state.series import SeriesRecorder, VersionRewardLog
from stepwell.pool.state.session_index import SessionIndex
from stepwell.pool.state.slice import Slice
from stepwell.pool.state.stored_step import StoredStep, TrajectoryPacker
from stepwell.pool.state.tombstones import Tombstones
from stepwell.steps.step import Step
from stepwell.steps.trainable import NO_SOUND_STEP, StepFilter

ENDED_KEPT = 10_000
"""How many ended leases are remembered, to tell an expired lease from an acknowledged one."""
S = TypeVar("S", bound=Slice)


class StateBase:
    def __init__(self, limits: Limits, journal: StateJournal, slices: Sequence[type[Slice]] = ()) -> None:
        self.limits = limits
        self.slices = tuple(kind(journal) for kind in slices)
        self.keepers = [part for part in self.slices if type(part).keeps is not Slice.keeps]
        """Slices that may keep a group from eviction and staleness."""
        self.now = 0.0
        """Wall-clock time: when something happened."""
        self.pool_time = 0.0
        """Seconds that pass only while the pool runs, whatever the wall clock does. Deadlines, leases and rests are in
        it."""
        self.serving = Serving()
        self.gateways: tuple[str, ...] = ()
        """Gateways that were alive when the pool last looked."""
        self.shard = 0
        """The index of this shard."""
        self.layouts: tuple[Layout, ...] = (Layout(FIRST_REVISION, 1),)
        """By which shards have groups: former layouts, and last the present one."""
        self.trajectories: dict[str, Trajectory] = {}
        """Open, complete or under lease."""
        self._packer = TrajectoryPacker()
        self.history: dict[str, Trajectory] = {}
        """Trained, and kept for batches that mix new and old."""
        self.closed: OrderedDict[str, int] = OrderedDict()
        """The last trajectories that are gone, each with the number of the last reward given to it."""
        self.closed_subjects: dict[str, str] = {}
        """The subject's digest for each closed trajectory that had a subject, by the trajectory's uid."""
        self.tombstones = Tombstones()
        self.has_retention = False
        """Was a trajectory ever opened that has a retention of its own?"""
        self.leases: dict[str, Lease] = {}
        self.ended_leases: OrderedDict[str, Settlement] = OrderedDict()
        self.acknowledged: set[str] = set()
        """Decisions for batches of which this shard is the coordinator, and of which others may still have a part."""
        self.quarantine: deque[Step] = deque(maxlen=limits.quarantine_kept)
        self.decisions: deque[PolicyDecision] = deque(maxlen=DECISIONS_KEPT)
        """About versions of the policy, the oldest first. A pool's first shard has them."""
        self.version_rewards = VersionRewardLog()
        self._journal = journal
        self._counters = Counters()
        self._channels: dict[str, ChannelIndex] = {}
        self._expiry: PrioritySet[tuple[float, str]] = PrioritySet()
        self._rewards = RewardQueue(self.trajectories)
        self.change_log = ChangeLog(self.trajectories, limits.gone_kept)
        self.series = SeriesRecorder(self._channels)
        self.sessions = SessionIndex(limits.closed_kept)

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        return self.serving.policy_version

    @property
    def channels(self) -> Mapping[str, Channel]:
        return self._channels

    @property
    def uniform_groups(self) -> int:
        """How many groups of equal rollouts were handed out."""
        return self._counters.uniform_groups

    def channel_of(self, group: Group) -> Channel:
        return self._channels[group.channel]

    def slice_of(self, kind: type[S]) -> S:
        """The state of that feature."""
        for part in self.slices:
            if isinstance(part, kind):
                return part
        raise LookupError(f"{kind.__name__} is not among the slices of this shard")

    def why_kept(self, group: Group) -> str:
        """Why the group is neither evicted nor stale, in a few words; empty if no slice keeps it."""
        return next(filter(None, (part.keeps(group) for part in self.keepers)), "")

    def remark_on(self, trajectory: Trajectory) -> str:
        """What slices say of a held trajectory, in sentences."""
        return " ".join(filter(None, (part.explain(trajectory) for part in self.slices)))

    def present(self, channel: str) -> Present:
        """What the staleness of the channel's steps is counted from."""
        return Present(self.serving.version_of(channel), self.now)

    def is_own(self, prompt_uid: str) -> bool:
        """By the present layout, may this shard open groups of the prompt?"""
        return self.layouts[-1].owner(prompt_uid) == self.shard

    def is_elsewhere(self, trajectory_uid: str, prompt_uid: str, opens_in: str | None = None) -> bool:
        """Must another shard be asked for this trajectory? `opens_in` is the channel in which it may be opened.

        Clients ask the shards of former layouts first. So before a group of a prompt is opened by the present layout,
        every shard that could have one of that prompt has said that nothing can join it there.
        """
        if len(self.layouts) < 2 or self.is_own(prompt_uid):
            return False
        if any(trajectory_uid in known for known in (self.trajectories, self.closed, self.history)):
            return False
        channel = None if opens_in is None else self.channels.get(opens_in)
        return channel is None or channel.joinable(prompt_uid) is None

    def misplaced(self) -> int:
        """Groups that are here because of a former layout."""
        queued = chain.from_iterable(channel.groups.values() for channel in self.channels.values())
        leased = chain.from_iterable(lease.groups for lease in self.leases.values())
        return sum(not self.is_own(group.prompt_uid) for group in chain(queued, leased))

    def holds(self, trajectory: Trajectory) -> bool:
        """A trajectory can be dropped while single steps of it are under lease."""
        return self.trajectories.get(trajectory.uid) is trajectory

    def last_snapshot(self, trajectory_uid: str) -> TrajectorySnapshot | None:
        """Returns the last snapshot of a trajectory that is gone; None if it is unknown, or nothing of it is kept."""
        return self.change_log.last_snapshot(trajectory_uid)

    def expired_lease(self) -> Lease | None:
        """The lease that expired first, if any has."""
        first = self._expiry.first()
        return self.leases[first[1]] if first is not None and first[0] <= self.pool_time else None

    @property
    def offered_for_scoring(self) -> int:
        """Grows with every trajectory that is offered to reward workers."""
        return self._rewards.offered

    def oldest_unscored(self, count: int) -> list[Trajectory]:
        return self._rewards.oldest(count)

    @property
    def reward_leases(self) -> Collection[str]:
        return self._rewards.leases

    def under_reward_lease(self, lease_uid: str) -> list[Trajectory]:
        return self._rewards.under(lease_uid)

    def being_scored(self, lease_uid: str, trajectory_uid: str) -> Trajectory | None:
        """The trajectory, if it is still under that reward lease."""
        return self._rewards.find(lease_uid, trajectory_uid)

    def stats(self) -> PoolStats:
        counters = self._counters
        return PoolStats(
            policy_version=self.policy_version,
            channels={name: channel.stats() for name, channel in self._channels.items()},
            submitted=counters.submitted,
            refused=counters.refused.copy(),
            quarantined=counters.quarantined.copy(),
            in_grace=counters.in_grace,
            uniform_groups=counters.uniform_groups,
            unfinished=counters.unfinished,
            decided=counters.decided.copy(),
            marked=counters.marked.copy(),
            leases=len(self.leases),
            forks=counters.forks,
            sessions=SessionStats(
                open=len(self.sessions.called), ended_idle=counters.idle_ends, deferred=counters.deferred
            ),
            scoring=ScoringStats(
                waiting=len(self._rewards),
                under_way=self._rewards.leased(),
                resting=self._rewards.resting(),
                scored=counters.scored,
                failed=counters.failed_judgements.copy(),
                late=counters.late_judgements,
                abstained_steps=counters.abstained_steps,
            ),
        )

    def snapshot(self) -> dict[str, Any]:
        """The numbers, in plain values; `recall` takes them back."""
        layouts = [(layout.revision, layout.shards) for layout in self.layouts]
        return {
            "gateways": self.gateways,
            "layouts": layouts,
            "version_rewards": dict(self.version_rewards.counts),
            "has_retention": self.has_retention,
            "running_time": self.tombstones.running.marks,
            "counters": self._counters.dump(),
            "units": {name: channel.unit for name, channel in self._channels.items()},
            "ledgers": {name: channel.ledger.dump() for name, channel in self._channels.items()},
            **dump_serving(self.serving),
        }

    # -- how operations end --------------------------------------------------------------------------------------------

    def open_channel(self, name: str) -> ChannelIndex:
        """The channel of that name, a new one if there is none."""
        if name not in self._channels:
            if len(self._channels) >= self.limits.max_channels:
                raise BadRequest(f"channel {name!r} would be one too many: the pool has {len(self._channels)} already")
            self._channels[name] = ChannelIndex(name, self.limits)
        return self._channels[name]

    def _changed(self, trajectory: Trajectory) -> None:
        """The end of every operation on a trajectory's own fields."""
        self._journal.save_trajectory(trajectory)
        if trajectory.group.trained:
            last = self.change_log.last_snapshot(trajectory.uid)
            self.change_log.end(trajectory, TrajectoryState.TRAINED, last.cause if last else "")
        else:
            self.change_log.record(trajectory)
            self._update_rewards(trajectory)

    def _regrouped(self, group: Group) -> None:
        """The end of every operation that may make a queued group ready, or no longer ready."""
        if self._channels[group.channel].reindex(group):
            self.change_log.record_all(group.trajectories.values())

    def _rewarded(self, group: Group) -> None:
        """A reward makes a group ready only where rewards are required."""
        if self.limits.require_reward:
            self._regrouped(group)

    def _note_first_reward(self, trajectory: Trajectory, value: float, step: StoredStep | None = None) -> None:
        """Records the first reward of a step, or of the trajectory: then it counts for the version that sampled its
        last sound step, if there is one."""
        if step is None:
            step = next((step for _, step in reversed(trajectory.in_order()) if step.quarantine is None), None)
        if step is not None:
            reward = VersionReward(step.newest_version, value, trajectory.uid)
            self.version_rewards.add(trajectory.group.channel, reward)

    def _update_rewards(self, trajectory: Trajectory) -> None:
        if self.limits.require_reward:
            self._rewards.update(trajectory)

    def _enter(self, group: Group) -> None:
        """Into its channel's queue."""
        self._channels[group.channel].add(group)
        self.change_log.record_all(group.trajectories.values())
        if self.limits.require_reward:
            for trajectory in group.trajectories.values():
                self._rewards.update(trajectory)

    def _leave(self, group: Group) -> None:
        """Out of its channel's queue."""
        self._channels[group.channel].remove(group)
        if self.limits.require_reward:
            for uid in group.trajectories:
                self._rewards.withdraw(uid)

    def _join(self, group: Group, trajectory: Trajectory) -> None:
        trajectory.group = group
        self.trajectories[trajectory.uid] = group.trajectories[trajectory.uid] = trajectory
        index = self._channels[group.channel]
        group.nbytes += trajectory.nbytes
        index.grow(group, trajectory.nbytes)
        index.trajectories += 1
        index.completed += trajectory.completed
        self.sessions.add(trajectory, self.pool_time)
        self.has_retention |= RETENTION in trajectory.metadata
        if trajectory.completed:
            self._regrouped(group)
        else:
            index.note_joined(group)
        self._changed(trajectory)

    def _take_out(self, trajectory: Trajectory) -> None:
        """Out of its group. The group stays in the queue unless it is empty now."""
        group = trajectory.group
        self._leave(group)
        del group.trajectories[trajectory.uid]
        group.nbytes -= trajectory.nbytes
        if group.trajectories:
            self._enter(group)
        else:
            self._journal.remove_group(group)

    def _close(
        self, trajectory: Trajectory, state: TrajectoryState, cause: str = "", note: str = ""
    ) -> TrajectorySnapshot:
        """It is gone. Only its last snapshot is left."""
        uid = trajectory.uid
        self.trajectories.pop(uid, None)
        self.sessions.end(uid)
        snapshot = self.change_log.end(trajectory, state, cause, note)
        self.closed[uid] = snapshot.revision
        subject = self.tombstones.subject_digest(trajectory.metadata)
        if subject:
            self.closed_subjects[uid] = subject
        self._journal.add_closed(uid, snapshot.revision, subject)
        if len(self.closed) > self.limits.closed_kept:
            self.closed_subjects.pop(self.closed.popitem(last=False)[0], None)
        return snapshot

    def _close_if_spent(self, group: Group) -> None:
        """A group is gone when all its steps have been taken one by one."""
        index = self._channels[group.channel]
        if index.unit is not Unit.STEPS or group.completed != group.size or any(True for _ in group.held_steps()):
            return
        self._leave(group)
        self._journal.remove_group(group)
        for trajectory in group.trajectories.values():
            snapshot = self._close(trajectory, TrajectoryState.TRAINED)
            self.series.trained(index.name).add(snapshot, self.serving.version_of(index.name))
        group.dissolve()

    def _retire_step(self, trajectory: Trajectory, step: StoredStep) -> None:
        """Only the identity of a shipped step is still needed. The last one takes its group along."""
        step.shipped = True
        self._channels[trajectory.group.channel].hide_step(step)
        self.change_log.record(trajectory)
        self._journal.save_step(step)
        self._close_if_spent(trajectory.group)

    def _add_lease(self, lease: Lease) -> None:
        self.leases[lease.uid] = lease
        self._expiry.add((lease.expires_at, lease.uid))

    def _end_lease(self, lease: Lease, how: Settlement) -> None:
        del self.leases[lease.uid]
        self._expiry.discard((lease.expires_at, lease.uid))
        self._journal.end_lease(lease, how)
        self._remember_ended(lease.uid, how)

    def _remember_ended(self, uid: str, how: Settlement) -> None:
        self.ended_leases[uid] = how
        if len(self.ended_leases) > ENDED_KEPT:
            self.ended_leases.popitem(last=False)

    def _train(self, group: Group, step_filter: StepFilter, version: int) -> None:
        index = self._channels[group.channel]
        accumulator = self.series.trained(index.name)
        for trajectory in group.trajectories.values():
            snapshot = self._close(trajectory, TrajectoryState.TRAINED, note=note_of(trajectory))
            refusal = _count_shipped(index.ledger, trajectory, snapshot, step_filter)
            if refusal:
                self.change_log.end(trajectory, TrajectoryState.TRAINED, refusal)
            else:
                accumulator.add(snapshot, version)
        group.lease, group.trained = None, True
        for trajectory in list(group.trajectories.values()):
            if not may_keep(trajectory.metadata):
                self.refuse_names([self.tombstones.digest(trajectory.uid)])
                self._remove_history(trajectory)
            elif trajectory.rejected is not None:
                self._remove_history(trajectory)
        if group.trajectories:
            self._keep_history(group)
        else:
            self._journal.remove_group(group)

    def refuse_names(self, digests: Iterable[str]) -> int:
        """Take nothing more of trajectories and sessions with these names. Returns how many names are new."""
        fresh = [digest for digest in dict.fromkeys(digests) if digest not in self.tombstones.names]
        self.tombstones.names.update(fresh)
        if fresh:
            self._journal.add_refused_names(fresh)
        return len(fresh)

    def _keep_history(self, group: Group) -> None:
        """A group that leaves the history, or does not enter it, may move to the archive."""
        leaving = self._channels[group.channel].keep_history(group)
        if leaving is not group:
            self.history |= group.trajectories
            self._journal.save_group(group)
        if leaving is not None:
            if leaving is not group:
                for uid in leaving.trajectories:
                    self.history.pop(uid, None)
            self._journal.retire_group(leaving)

    def _remove_history(self, trajectory: Trajectory) -> None:
        group, index = trajectory.group, self._channels[trajectory.group.channel]
        self.history.pop(trajectory.uid, None)
        del group.trajectories[trajectory.uid]
        self._journal.remove_trajectory(trajectory)
        if not group.trajectories and group in index.history:
            index.history.remove(group)
            self._journal.remove_group(group)


def _count_shipped(
    ledger: Ledger, trajectory: Trajectory, snapshot: TrajectorySnapshot, step_filter: StepFilter
) -> str:
    """Does what `Ledger.ship` does for a trajectory. If the filter accepts it whole, it is counted at once."""
    worst = snapshot.exactness
    is_whole = worst and snapshot.untrainable == 0 and not step_filter.models
    if is_whole and worst and worst.at_least(step_filter.min_exactness):
        ledger.shipped.add(snapshot.steps - snapshot.quarantined, snapshot.tokens)
        return ""
    held = trajectory.held_steps()
    return ledger.ship(held, step_filter) if held else NO_SOUND_STEP
