"""Watchers read what happened."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepwell.common.message_format import message
from stepwell.pool.api.stats import SeriesChunk, TimeSeries, merge_chunks
from stepwell.pool.shard.operation import MergedOperation

if TYPE_CHECKING:
    from stepwell.pool.shard.shard import Shard


@message
@dataclass(frozen=True, slots=True)
class ReadSeries(MergedOperation[SeriesChunk, TimeSeries]):
    """What happened in the last seconds."""

    seconds: float
    over_network = True

    def run(self, shard: "Shard") -> SeriesChunk:
        return shard.pool.state.series.chunk(self.seconds)

    def merge(self, parts: Mapping[str, SeriesChunk], missing: tuple[str, ...]) -> TimeSeries:
        return merge_chunks(list(parts.values()), missing)
