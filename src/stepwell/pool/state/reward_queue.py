"""Which trajectories lack a reward, and which reward worker has which of them.

- Workers that judge whole trajectories are offered complete ones without a reward. Workers that judge by step are
  offered every trajectory that has grown since it was judged, open ones from their second step on.
- The queue is not journaled: after a restart every unscored trajectory is offered again.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from stepwell.pool.state.queues import PrioritySet
from stepwell.pool.state.records import Trajectory

RESTING, GIVEN_UP = "resting", "given up"
"""Values of `Trajectory.reward_lease` beside a lease's uid: it waits for the next attempt, or no attempt is left."""


@dataclass(frozen=True, slots=True)
class RewardLease:
    """Trajectories that a worker has and has not judged yet."""

    expires_at: float
    uids: dict[str, tuple[int, bool]]
    """In order, each with its extent at that time. Some may have changed or gone since: only those count whose
    `reward_lease` names this lease."""


class RewardQueue:
    def __init__(self, held: Mapping[str, Trajectory]) -> None:
        self.by_step = False
        """Do the workers judge by step? The last one that asked for work tells."""
        self.offered = 0
        """How many trajectories were offered so far; one that is offered again counts again."""
        self._held = held
        self._waiting: PrioritySet[tuple[int, int, int, str]] = PrioritySet()
        self._keys: dict[str, tuple[int, int, int, str]] = {}
        """The key under which each trajectory waits. Its group, and so its own key, may have changed since."""
        self._leases: dict[str, RewardLease] = {}
        self._expiry: PrioritySet[tuple[float, str]] = PrioritySet()
        self._resting: PrioritySet[tuple[float, str]] = PrioritySet()

    @property
    def leases(self) -> Collection[str]:
        return self._leases.keys()

    def __len__(self) -> int:
        """Trajectories that a worker can take."""
        return len(self._waiting)

    def waiting(self) -> set[str]:
        return set(self._keys)

    def oldest(self, count: int) -> list[Trajectory]:
        return [self._held[uid] for *_, uid in self._waiting.smallest(count)]

    def leased(self) -> int:
        return sum(len(self.under(uid)) for uid in self._leases)

    def resting(self) -> int:
        return len(self._named(RESTING, {uid for _, uid in self._resting}))

    def has_lease(self, lease_uid: str) -> bool:
        return lease_uid in self._leases

    def under(self, lease_uid: str) -> list[Trajectory]:
        """The trajectories that are still under the lease."""
        lease = self._leases.get(lease_uid)
        return [] if lease is None else self._named(lease_uid, lease.uids)

    def find(self, lease_uid: str, trajectory_uid: str) -> Trajectory | None:
        """The trajectory, if it is still under the lease."""
        lease = self._leases.get(lease_uid)
        found = self._held.get(trajectory_uid)
        is_leased = lease is not None and trajectory_uid in lease.uids and found is not None
        return found if is_leased and found is not None and found.reward_lease == lease_uid else None

    def update(self, trajectory: Trajectory) -> None:
        """Offer the trajectory if it lacks a reward, withdraw it otherwise."""
        uid, is_free = trajectory.uid, trajectory.reward_lease is None and trajectory.is_at_home
        is_due = trajectory.has_steps_due() if self.by_step else trajectory.lacks_reward()
        trajectory.awaits_steps = self.by_step and is_due and trajectory.reward_lease != GIVEN_UP
        is_offered = is_free and is_due
        if is_offered and self._keys.get(uid) != trajectory.key:
            self.withdraw(uid)
            self._keys[uid] = trajectory.key
            self._waiting.add(trajectory.key)
            self.offered += 1
        elif not is_offered:
            self.withdraw(uid)

    def note_growth(self, trajectory: Trajectory) -> None:
        """It has got a step, the reward of a step, or its end. A judgement of the whole that is under way did not see
        all of it; one by step still counts, for the steps that it saw."""
        if not self.by_step or trajectory.reward_lease in (RESTING, GIVEN_UP):
            trajectory.reward_lease = None

    def withdraw(self, trajectory_uid: str) -> None:
        key = self._keys.pop(trajectory_uid, None)
        if key is not None:
            self._waiting.discard(key)

    def lease_out(self, lease_uid: str, expires_at: float, trajectories: Sequence[Trajectory]) -> None:
        self._leases[lease_uid] = RewardLease(expires_at, {found.uid: found.extent for found in trajectories})
        self._expiry.add((expires_at, lease_uid))
        for trajectory in trajectories:
            self._set(trajectory, lease_uid)

    def settle(self, trajectory: Trajectory, *, failed: bool = False) -> None:
        """A worker has judged it, or failed to. The lease ends with its last trajectory."""
        lease_uid = trajectory.reward_lease or ""
        lease = self._leases[lease_uid]
        extent = lease.uids.pop(trajectory.uid)
        if not failed:
            trajectory.judged = extent
        if not lease.uids:
            self._end(lease_uid)
        self._set(trajectory, None)

    def rest(self, trajectory: Trajectory, until: float) -> None:
        self._resting.add((until, trajectory.uid))
        self._set(trajectory, RESTING)

    def give_up(self, trajectory: Trajectory) -> None:
        self._set(trajectory, GIVEN_UP)

    def release(self, now: float) -> None:
        """Offer again what was not judged in time, and what has rested."""
        while (first := self._expiry.first()) is not None and first[0] <= now:
            self.end_lease(first[1])
        while (first := self._resting.first()) is not None and first[0] <= now:
            self._resting.discard(first)
            for trajectory in self._named(RESTING, [first[1]]):
                self._set(trajectory, None)

    def end_lease(self, lease_uid: str) -> None:
        """Offer again what was not judged."""
        unanswered = self.under(lease_uid)
        self._end(lease_uid)
        for trajectory in unanswered:
            self._set(trajectory, None)

    def _set(self, trajectory: Trajectory, reward_lease: str | None) -> None:
        trajectory.reward_lease = reward_lease
        self.update(trajectory)

    def _end(self, lease_uid: str) -> None:
        self._expiry.discard((self._leases.pop(lease_uid).expires_at, lease_uid))

    def _named(self, reward_lease: str, uids: Iterable[str]) -> list[Trajectory]:
        held = self._held
        return [held[uid] for uid in uids if uid in held and held[uid].reward_lease == reward_lease]
