"""What goes when a channel that drops is full."""

from stepwell.pool.state.channel_index import Channel
from stepwell.pool.state.pool_state import PoolState


def evict_oldest(state: PoolState, channel: Channel, more_groups: int = 0) -> None:
    """Drop the oldest groups until the channel is within its limits, with room for that many more."""
    while channel.is_over(more_groups) and (oldest := channel.oldest()) is not None:
        state.drop_group(oldest, "evicted")
