"""What an operation finds where it runs: the pool of one shard, its gateways, and what it tells them."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from uuid import uuid4

from stepwell.pool.api.policy import Serving
from stepwell.pool.api.producing import CallBegun, FlushNeeded, RewardGiven
from stepwell.pool.api.stats import PoolStats
from stepwell.pool.api.transport import flush_topic
from stepwell.pool.shard.archive_files import LateReward
from stepwell.pool.shard.gateway_roster import HEARTBEAT, EngineReports, GatewayRoster

log = logging.getLogger("stepwell.pool")


class Shard:
    def __init__(self, transactions: ShardTransactions) -> None:
        self.transactions = transactions
        self.pool = transactions.pool
        """The rules and the state. Other code in the same process may read them."""
        self.epoch = uuid4().hex
        """Another one after each start."""
        self.watch_epoch = self.epoch
        """Watchers that know another one read everything again, and lose what is no longer there."""
        self.on_flushed: list[Callable[[str, Sequence[str]], None]] = []
        """Called when a gateway has flushed what it was asked for."""
        self.on_stats: list[Callable[[PoolStats], PoolStats]] = []
        """Add to the statistics of the shard what slices count."""
        self.engine_reports = EngineReports(transactions.monotonic)
        self.news = ShardNews(self.epoch, transactions, self.engine_reports)
        self.gateways = GatewayRoster(
            self.pool.state.gateways, transactions.monotonic, lambda gateway: self.news.post(flush_topic(gateway))
        )

    def renew_watch_epoch(self) -> None:
        self.watch_epoch = uuid4().hex

    @property
    def serving(self) -> Serving:
        return replace(self.pool.state.serving, epoch=self.epoch)

    def attach(self, trajectory_uid: str, gateway: str) -> None:
        """The gateway serves the trajectory."""
        trajectory = self.pool.state.trajectories.get(trajectory_uid)
        if trajectory is not None:
            self.pool.state.touch_session(trajectory)
        if gateway:
            self.gateways.watch()
        if gateway in self.pool.state.gateways:
            self.gateways.note(gateway)
        elif gateway:
            self.note_gateway(gateway)
        if trajectory is not None and gateway and gateway not in trajectory.gateways:
            self.pool.state.set_gateways(trajectory, {*trajectory.gateways, gateway})

    def note_gateway(self, gateway: str) -> None:
        """It lives. After a restart of the shard it is asked too."""
        for ended in self.gateways.take_predecessors(gateway):
            self.pool.state.lose_gateway(ended, heir=gateway)
            self.news.remove(flush_topic(ended))
        self.gateways.note(gateway)
        self.look_for_dead()
        self.pool.state.set_living_gateways(self.gateways.living())

    def look_for_dead(self) -> None:
        """The rollouts that a dead gateway served may lack a call."""
        for gateway, has_told in self.gateways.take_dead().items():
            log.warning("gateway %s was not heard for %g s: it is taken for dead", gateway, HEARTBEAT)
            if not has_told:
                self.pool.state.lose_untold(gateway)
            self.pool.state.lose_gateway(gateway)
            self.news.remove(flush_topic(gateway))

    def note_told(self, gateway: str, calls: Sequence[CallBegun]) -> None:
        """These are all calls that it has under way."""
        for call in calls:
            self.attach(call.trajectory_uid, gateway)
        self.pool.state.tell_calls(gateway, calls)
        self.gateways.note_told(gateway)

    def holders(self, trajectory_uid: str, but: str) -> set[str]:
        """The other gateways that may hold steps of a trajectory. Without the name of one, they are not known."""
        trajectory = self.pool.state.trajectories.get(trajectory_uid)
        if not but or trajectory is None or trajectory.completed or not trajectory.is_at_home:
            return set()
        self.note_gateway(but)
        return self.gateways.holders(trajectory, but=but)

    def check_flushed(self, trajectory_uid: str, gateway: str) -> None:
        """FlushNeeded if another gateway than this one may hold steps of the trajectory."""
        if self.holders(trajectory_uid, gateway):
            raise FlushNeeded(trajectory_uid, gateway)

    def keep_late(self, reward: RewardGiven) -> bool:
        """Write the reward to the archive; False if there is none."""
        archive = self.transactions.archive
        if archive is None:
            return False
        revision = self.pool.state.count_late_reward(reward.trajectory_uid)
        archive.add_late_reward(LateReward(**asdict(reward), revision=revision, at=self.transactions.clock()))
        return True


class ShardCalls:
    """The base of the calls to a shard."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.pool = shard.pool
        self._transactions = shard.transactions
