"""What a gateway holds for the pool: a bounded queue, and how much of it is whose. It knows no clock and no loop.

What always holds: a step counts as held from `add` until `settle` or `trim`, under way or not; the bounds are kept by
giving up the oldest that is not under way; what was put off (the pool has no room for it) lets others pass.
"""

from collections import deque
from collections.abc import Sequence

from stepwell.steps.step import Step

MAX_MESSAGE = 256
"""Steps in one message."""
MAX_MESSAGE_BYTES = 32 * 2**20
"""Bytes in one message, unless a single step has more."""
BESIDE_TOKENS = 1024
"""About what a step weighs without its arrays."""


def weight(step: Step) -> int:
    """About its bytes, packed or not: 4 a token, 5 more a response token for log-probability and mask."""
    return BESIDE_TOKENS + 4 * len(step.prompt_ids) + 9 * len(step.response_ids)


class OutboxQueue:
    def __init__(self, max_steps: int, max_bytes: int) -> None:
        self.steps = 0
        self.nbytes = 0
        self._max_steps = max_steps
        self._max_bytes = max_bytes
        self._queue: deque[Step] = deque()
        self._put_off: deque[Step] = deque()
        self._by_trajectory: dict[str, int] = {}

    @property
    def queued(self) -> int:
        """How many could be taken now."""
        return len(self._queue)

    def held(self, trajectory_uid: str | None) -> int:
        """Steps of that trajectory; None means all."""
        return self.steps if trajectory_uid is None else self._by_trajectory.get(trajectory_uid, 0)

    def add(self, steps: Sequence[Step]) -> None:
        self._queue.extend(steps)
        self.steps += len(steps)
        for step in steps:
            self.nbytes += weight(step)
            self._by_trajectory[step.trajectory_uid] = self._by_trajectory.get(step.trajectory_uid, 0) + 1

    def take(self) -> list[Step]:
        """The oldest, as many as fit in a message. They are under way until they are settled, returned or put off."""
        message: list[Step] = []
        room = MAX_MESSAGE_BYTES
        while self._queue and len(message) < MAX_MESSAGE:
            room -= weight(self._queue[0])
            if message and room < 0:
                break
            message.append(self._queue.popleft())
        return message

    def give_back(self, message: Sequence[Step]) -> None:
        """It did not arrive: it is the oldest again."""
        self._queue.extendleft(reversed(message))

    def put_off(self, steps: Sequence[Step]) -> None:
        self._put_off.extend(steps)

    def resume(self) -> None:
        """What was put off may be taken again, after all the others."""
        self._queue.extend(self._put_off)
        self._put_off.clear()

    def settle(self, step: Step) -> None:
        """It is held no longer."""
        self.steps -= 1
        self.nbytes -= weight(step)
        left = self._by_trajectory[step.trajectory_uid] - 1
        if left:
            self._by_trajectory[step.trajectory_uid] = left
        else:
            del self._by_trajectory[step.trajectory_uid]

    def trim(self) -> list[Step]:
        """Let go of the oldest until the bounds are kept; gives what had to go."""
        gone: list[Step] = []
        while (self.steps > self._max_steps or self.nbytes > self._max_bytes) and (self._put_off or self._queue):
            step = (self._put_off or self._queue).popleft()
            self.settle(step)
            gone.append(step)
        return gone
