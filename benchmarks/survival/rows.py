"""All rows of the table, in its order."""

from benchmarks.survival.gateways import SeveralGateways
from benchmarks.survival.head import LostHead
from benchmarks.survival.hostile import HostileRequests
from benchmarks.survival.lost_node import NodeLostWithDatabase, NodeLostWithFiles
from benchmarks.survival.postgres_failover import PostgresFailover
from benchmarks.survival.row import SurvivalRow
from benchmarks.survival.stopped_shard import StoppedShard

ROWS: tuple[SurvivalRow, ...] = (
    SeveralGateways(),
    LostHead(10, redis=False),
    LostHead(10, redis=True),
    LostHead(90, redis=False),
    LostHead(90, redis=True),
    NodeLostWithFiles(),
    NodeLostWithDatabase(),
    PostgresFailover(),
    StoppedShard(),
    HostileRequests(),
)
