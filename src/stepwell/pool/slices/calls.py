"""What gateways tell of calls."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepwell.common.message_format import message
from stepwell.pool.shard.operation import TrajectoryOperation

if TYPE_CHECKING:
    from stepwell.pool.shard.shard import Shard


@message
@dataclass(frozen=True, slots=True)
class MarkUnseen(TrajectoryOperation[None]):
    """What is known of who read these steps. They may arrive later; it may be sent again."""

    step_uids: Sequence[str]
    reason: str
    """UNSEEN, READ, NOT_CONTINUED or CONTINUED."""

    def run(self, shard: "Shard") -> None:
        shard.pool.ingest.mark_unseen(self.trajectory_uid, self.prompt_uid, self.step_uids, self.reason)
