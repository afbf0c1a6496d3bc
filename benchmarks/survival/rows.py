"""All rows of the table, in its order."""

from benchmarks.survival.clock import ClockJump
from benchmarks.survival.dead_gateways import DeadGateways
from benchmarks.survival.forks import ForkingTrajectory
from benchmarks.survival.full_disk import FullArchiveDisk, FullJournalDisk, FullSpoolDisk
from benchmarks.survival.gateways import SeveralGateways
from benchmarks.survival.head import LostHead
from benchmarks.survival.hostile import HostileRequests
from benchmarks.survival.killed_clients import KilledClients
from benchmarks.survival.link_down import LinkDown
from benchmarks.survival.live_kills import LiveKills
from benchmarks.survival.lost_node import NodeLostWithDatabase, NodeLostWithFiles
from benchmarks.survival.postgres_failover import PostgresFailover
from benchmarks.survival.power_loss import PowerLoss
from benchmarks.survival.releases import MixedReleases
from benchmarks.survival.resharding import ChangedShards
from benchmarks.survival.retries import RetriedCalls
from benchmarks.survival.row import SurvivalRow
from benchmarks.survival.small_disk import ForgettingOnSmallDisk
from benchmarks.survival.soak import Soak
from benchmarks.survival.stopped_shard import StoppedShard
from benchmarks.survival.storm import FlushStorm
from benchmarks.survival.waiting_fetch import WaitingFetch

ROWS: tuple[SurvivalRow, ...] = (
    SeveralGateways(),
    ForkingTrajectory(),
    LostHead(10, redis=False),
    LostHead(10, redis=True),
    LostHead(90, redis=False),
    LostHead(90, redis=True),
    NodeLostWithFiles(),
    NodeLostWithDatabase(),
    PostgresFailover(),
    LinkDown(5),
    LinkDown(45),
    LinkDown(120),
    StoppedShard(),
    FlushStorm(),
    RetriedCalls(),
    DeadGateways(),
    MixedReleases(),
    HostileRequests(),
    WaitingFetch(),
    FullJournalDisk(),
    FullSpoolDisk(),
    FullArchiveDisk(),
    ForgettingOnSmallDisk(),
    PowerLoss(),
    ClockJump(+1),
    ClockJump(-1),
    KilledClients(),
    LiveKills(),
    Soak(),
    ChangedShards(),
)
