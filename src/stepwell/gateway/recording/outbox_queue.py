"""The steps that a gateway holds for the pool, in one lane for each shard. It knows no clock and no event loop.

- A step is held from `add` until `settle` or `trim`, also while it is in flight.
- The bounds hold for all lanes together. They are kept by giving up the oldest step that is not in flight.
- Postponed steps (the pool has no room for them, or refused them with an error) do not delay the others.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from stepwell.steps.step import Step

MAX_MESSAGE = 256
"""Steps in one message."""
MAX_MESSAGE_BYTES = 32 * 2**20
"""Bytes in one message, unless a single step has more."""
STEP_OVERHEAD = 1024
"""About the bytes of a step without its arrays."""


def step_bytes(step: Step) -> int:
    """About the bytes of a step: 4 per token, 5 more per response token for log-probability and mask."""
    return STEP_OVERHEAD + 4 * len(step.prompt_ids) + 9 * len(step.response_ids)


class Lane:
    """The steps for one shard that are not in flight, oldest first."""

    def __init__(self) -> None:
        self.queue: deque[Step] = deque()
        self.postponed: deque[Step] = deque()

    def oldest(self) -> deque[Step]:
        return self.postponed or self.queue


class OutboxQueue:
    def __init__(self, max_steps: int, max_bytes: int) -> None:
        self.steps = 0
        self.nbytes = 0
        self._max_steps = max_steps
        self._max_bytes = max_bytes
        self._unsorted: deque[Step] = deque()
        """Steps whose shard is not known yet."""
        self._lanes: dict[str, Lane] = {}
        self._numbers: dict[Step, int] = {}
        """Every step that is held, by its order of arrival."""
        self._arrived = 0
        self._by_trajectory: dict[str, int] = {}

    @property
    def has_unsorted(self) -> bool:
        return bool(self._unsorted)

    def queued(self, lane: str) -> int:
        """Steps that can be taken now."""
        return len(self._lane(lane).queue)

    def held(self, trajectory_uid: str | None) -> int:
        """Steps of that trajectory; None means all."""
        return self.steps if trajectory_uid is None else self._by_trajectory.get(trajectory_uid, 0)

    def add(self, steps: Sequence[Step]) -> None:
        self._unsorted.extend(steps)
        self.steps += len(steps)
        for step in steps:
            self._arrived += 1
            self._numbers[step] = self._arrived
            self.nbytes += step_bytes(step)
            self._by_trajectory[step.trajectory_uid] = self._by_trajectory.get(step.trajectory_uid, 0) + 1

    def sort(self, shard_of: Callable[[str], str]) -> set[str]:
        """Put new steps into the lanes of their shards, by prompt_uid. Returns these lanes."""
        lanes = set()
        while self._unsorted:
            step = self._unsorted.popleft()
            lane = shard_of(step.prompt_uid)
            self._lane(lane).queue.append(step)
            lanes.add(lane)
        return lanes

    def take(self, lane: str) -> list[Step]:
        """The oldest steps that fit in a message. They are in flight until they are settled, returned or postponed."""
        message: list[Step] = []
        queue, room = self._lane(lane).queue, MAX_MESSAGE_BYTES
        while queue and len(message) < MAX_MESSAGE:
            room -= step_bytes(queue[0])
            if message and room < 0:
                break
            message.append(queue.popleft())
        return message

    def give_back(self, lane: str, message: Sequence[Step]) -> None:
        """The message did not arrive: its steps are the oldest again."""
        self._lane(lane).queue.extendleft(reversed(message))

    def postpone(self, lane: str, steps: Iterable[Step]) -> None:
        self._lane(lane).postponed.extend(steps)

    def resume(self, lane: str) -> None:
        """Postponed steps may be taken again, after all others."""
        found = self._lane(lane)
        found.queue.extend(found.postponed)
        found.postponed.clear()

    def replace(self, step: Step, by: Step) -> None:
        """Hold another step, of the same trajectory, in the place of one that is in flight."""
        self._numbers[by] = self._numbers.pop(step)
        self.nbytes += step_bytes(by) - step_bytes(step)

    def settle(self, step: Step) -> None:
        """The step is no longer held."""
        del self._numbers[step]
        self.steps -= 1
        self.nbytes -= step_bytes(step)
        left = self._by_trajectory[step.trajectory_uid] - 1
        if left:
            self._by_trajectory[step.trajectory_uid] = left
        else:
            del self._by_trajectory[step.trajectory_uid]

    def discard(self, steps: Iterable[Step]) -> list[Step]:
        """No longer hold those of these steps that are in no lane yet. Returns them."""
        discarded = [step for step in steps if step in self._numbers]
        gone = set(discarded)
        self._unsorted = deque(step for step in self._unsorted if step not in gone)
        for step in discarded:
            self.settle(step)
        return discarded

    def trim(self) -> list[Step]:
        """Give up the oldest steps until the bounds are kept. Returns them."""
        dropped: list[Step] = []
        while (self.steps > self._max_steps or self.nbytes > self._max_bytes) and (oldest := self._oldest()):
            step = oldest.popleft()
            self.settle(step)
            dropped.append(step)
        return dropped

    def _oldest(self) -> deque[Step] | None:
        """The queue whose first step is the oldest that is not in flight."""
        queues = [queue for queue in (self._unsorted, *(lane.oldest() for lane in self._lanes.values())) if queue]
        return min(queues, key=lambda queue: self._numbers[queue[0]], default=None)

    def _lane(self, name: str) -> Lane:
        if name not in self._lanes:
            self._lanes[name] = Lane()
        return self._lanes[name]
