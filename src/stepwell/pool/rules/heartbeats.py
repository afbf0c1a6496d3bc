"""Leases whose holders send heartbeats, and which of them are silent for too long.

Pure: it knows no clock. It counts the seconds for which the shard has run, so a shard that was stopped, or restarts,
ends no lease before its holder could be heard.
"""

from collections.abc import Sequence

from stepwell.pool.api.leasing import Settlement, is_live, is_reward_lease
from stepwell.pool.state.pool_state import PoolState

EXTENSION = 60.0
"""Seconds to which a heartbeat renews a lease, if less than half of them is left: not every heartbeat is journaled."""


class LeaseHeartbeats:
    def __init__(self, state: PoolState, timeout: float) -> None:
        """`timeout` is the time in seconds after which a silent holder is taken for dead."""
        self._state = state
        self._timeout = timeout
        self._elapsed = 0.0
        self._heard: dict[str, float] = {}
        """When each lease was last named."""

    def renew(self, lease_uids: Sequence[str]) -> list[Settlement | None]:
        """The holder of these leases is alive. For each: None if it still holds it, else how the lease ended."""
        return [self._renew(uid) for uid in lease_uids]

    def pass_time(self, seconds: float) -> list[str]:
        """Returns the leases whose holders are silent."""
        self._elapsed += seconds
        live = [uid for uid in (*self._state.leases, *self._state.reward_leases) if is_live(uid)]
        self._heard = {uid: self._heard.get(uid, self._elapsed) for uid in live}
        return [uid for uid, heard in self._heard.items() if self._elapsed - heard >= self._timeout]

    def _renew(self, uid: str) -> Settlement | None:
        lease = self._state.leases.get(uid)
        if is_reward_lease(uid) and uid not in self._state.reward_leases:
            return Settlement.DONE
        if lease is None and not is_reward_lease(uid):
            return self._state.ended_leases.get(uid, Settlement.UNKNOWN)
        self._heard[uid] = self._elapsed
        if lease is not None and lease.expires_at < self._state.pool_time + EXTENSION / 2:
            self._state.extend_lease(lease, self._state.pool_time + EXTENSION)
        return None
