"""What serves the calls of a channel."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepwell.common.message_format import message
from stepwell.pool.api.serving_state import Serving
from stepwell.pool.shard.operation import Operation, ShardRoute

if TYPE_CHECKING:
    from stepwell.pool.shard.shard import Shard


@message
@dataclass(frozen=True, slots=True)
class PauseChannel(Operation[Serving]):
    """Gateways hold the channel's new calls, or no longer."""

    channel: str
    paused: bool
    route = ShardRoute.FIRST

    def run(self, shard: "Shard") -> Serving:
        shard.pool.state.pause_channel(self.channel, paused=self.paused)
        return shard.serving
