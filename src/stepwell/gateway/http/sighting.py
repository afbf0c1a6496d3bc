"""Whether somebody read an answer: its last byte was handed over to a connection that was open then.

- An answer has several readers if repeated calls get it too, at once or later. One who read it is enough.
- An answer whose end was an error was read by nobody.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stepwell.common.bounded_http import HANDOVER, Handover
from stepwell.gateway.requests import Message
from stepwell.pool.api.producing import READ
from stepwell.steps.trainable import UNSEEN

LOOK_INTERVAL = 0.05
STALLED_SECONDS = 60.0
"""A client that takes no byte of its answer for so long does not read it."""


def handover_of(scope: Message) -> Handover | None:
    """None under another server than the gateway's own. There, what was sent counts as read."""
    return (scope.get("extensions") or {}).get(HANDOVER)


async def is_handed_over(handover: Handover | None, stalled_seconds: float = STALLED_SECONDS) -> bool:
    """Waits until the kernel has taken all that was sent."""
    unsent = handover.unsent() if handover is not None else 0
    left = stalled_seconds
    while handover is not None and unsent and left > 0:
        await asyncio.sleep(LOOK_INTERVAL)
        before, unsent = unsent, handover.unsent()
        left = stalled_seconds if unsent is not None and unsent < before else left - LOOK_INTERVAL
    return unsent == 0


@dataclass(slots=True, eq=False)
class Sighting:
    """Whether anybody has read one answer."""

    mark: Callable[[Sequence[str], str], object]
    """Marks steps by their uids."""
    uids: Sequence[str] = ()
    """The uids of the answer's steps, once they are recorded."""
    is_whole: bool = False
    """Whether the answer was sent to its end, and is not an error."""
    is_read: bool = False
    is_unseen: bool = False
    """Whether the answer was marked as unseen."""

    def note(self, *, is_read: bool) -> None:
        """One client has read it, or has not."""
        if not self.uids or self.is_read:
            return
        self.is_read = is_read and self.is_whole
        if self.is_read and self.is_unseen:
            self.mark(self.uids, READ)
        elif not self.is_read and not self.is_unseen:
            self.is_unseen = True
            self.mark(self.uids, UNSEEN)
