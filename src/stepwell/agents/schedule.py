"""Which rollouts to start now. Pure: no clock, no waiting, no HTTP.

- At most `concurrency` rollouts run.
- A group for training is opened only while the pool's pacing leaves room; then all its rollouts may start.
- A rollout counts from its start, whether the pool has registered it yet or not.
- Groups that lack the fewest rollouts come first.
- A failed rollout is retried `retries` times; then its group is given up.
- While the gateway does not answer, nothing starts.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from stepwell.agents.dataset import Prompt
from stepwell.agents.rollout import RolloutStatus
from stepwell.wire.gateway_api import PacingNow


@dataclass(frozen=True, slots=True, eq=False)
class RolloutStart:
    """A rollout to be started."""

    prompt: Prompt
    attempt: int
    is_validation: bool


@dataclass(slots=True, eq=False)
class ScheduledGroup:
    prompt: Prompt
    is_validation: bool
    number: int
    """The place in the order of opening."""
    waiting: deque[int]
    """The attempt numbers of the rollouts to start."""
    running: set[RolloutStart] = field(default_factory=set)
    completed: int = 0
    is_released: bool = False
    """The pool has shipped or dropped it, or its unfinished rollouts; no retries, the pool asks if it needs more."""

    is_given_up: bool = False
    """A rollout failed after all its retries; those that still run are of no use."""

    @property
    def urgency(self) -> tuple[int, int]:
        """Smaller is more urgent: fewest missing rollouts first, then the oldest."""
        return len(self.waiting) + len(self.running), self.number


class RolloutSchedule:
    def __init__(
        self,
        prompts: Iterator[Prompt],
        find: Callable[[str], Prompt | None],
        *,
        group_size: int,
        validation_size: int,
        concurrency: int,
        retries: int,
        groups: int | None = None,
    ) -> None:
        """`find` returns the prompt of a group that was opened before. `groups` is the number of groups to open for
        training; it must not exceed the number of prompts."""
        self._prompts = prompts
        self._find = find
        self._group_size = group_size
        self._validation_size = validation_size
        self._concurrency = concurrency
        self._retries = retries
        self._left = groups
        self._groups: dict[str, ScheduledGroup] = {}
        self._to_validate: deque[Prompt] = deque()
        self._running: set[RolloutStart] = set()
        self._unopened: set[RolloutStart] = set()
        """Running, and not yet registered in the pool."""
        self._pace: PacingNow | None = None
        self._uncounted: list[RolloutStart] = []
        """Rollouts for training that the pool's last answer may not include."""
        self._uncounted_next: list[RolloutStart] | None = None
        """The same for the answer that is awaited; None if none is."""
        self._opened = 0
        self._given_up: set[str] = set()

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def is_validating(self) -> bool:
        return bool(self._to_validate) or any(group.is_validation for group in self._groups.values())

    @property
    def is_stopping(self) -> bool:
        """No more groups will be opened for training."""
        return self._left == 0

    @property
    def is_over(self) -> bool:
        return self._left == 0 and not (self._groups or self._to_validate or self._running)

    def stop(self) -> None:
        """Open no more groups for training."""
        self._left = 0

    def validate(self, prompts: Sequence[Prompt]) -> None:
        self._to_validate.extend(prompts)

    # -- pacing --------------------------------------------------------------------------------------------------------

    def pacing_requested(self) -> None:
        """The pool's answer may not include rollouts that start from now on."""
        self._uncounted_next = [start for start in self._unopened if not start.is_validation]

    def pacing_received(self, pace: PacingNow | None) -> None:
        """None: the gateway did not answer."""
        self._pace, self._uncounted, self._uncounted_next = pace, self._uncounted_next or [], None
        missing = Counter[str]()
        for refill in pace.refills if pace else ():
            missing[refill.prompt_uid] += refill.missing
        for prompt_uid, count in missing.items():
            self._refill(prompt_uid, count)

    def _refill(self, prompt_uid: str, missing: int) -> None:
        group = self._groups.get(prompt_uid)
        coming = sum(start.prompt.uid == prompt_uid for start in self._uncounted)
        wanted = missing - coming - (len(group.waiting) if group else 0)
        if wanted <= 0:
            return
        if group is not None:
            group.waiting.extend([0] * wanted)
            group.is_released = False
        elif prompt_uid not in self._given_up and (prompt := self._find(prompt_uid)) is not None:
            self._open(prompt, wanted, is_validation=False)

    # -- starting ------------------------------------------------------------------------------------------------------

    def next_starts(self) -> list[RolloutStart]:
        """The rollouts to start now; they count as running."""
        if self._pace is None:
            return []
        starts: list[RolloutStart] = []
        for group in sorted(self._groups.values(), key=lambda group: group.urgency):
            starts += self._start(group)
        while self._has_slot() and self._to_validate:
            group = self._open(self._to_validate.popleft(), self._validation_size, is_validation=True)
            starts += self._start(group)
        while self._has_slot() and self._may_open():
            self._left = None if self._left is None else self._left - 1
            starts += self._start(self._open(next(self._prompts), self._group_size, is_validation=False))
        return starts

    def _start(self, group: ScheduledGroup) -> list[RolloutStart]:
        starts = []
        while group.waiting and self._has_slot():
            start = RolloutStart(group.prompt, group.waiting.popleft(), group.is_validation)
            group.running.add(start)
            self._running.add(start)
            self._unopened.add(start)
            starts.append(start)
        if not group.is_validation:
            self._uncounted += starts
            if self._uncounted_next is not None:
                self._uncounted_next += starts
        return starts

    def _open(self, prompt: Prompt, size: int, *, is_validation: bool) -> ScheduledGroup:
        self._opened += 1
        group = ScheduledGroup(prompt, is_validation, self._opened, deque([0] * size))
        self._groups[prompt.uid] = group
        return group

    def _has_slot(self) -> bool:
        return len(self._running) < self._concurrency

    def _may_open(self) -> bool:
        if self._left == 0 or self._pace is None:
            return False
        if self._pace.may_start is None:
            return True
        promised = sum(len(group.waiting) for group in self._groups.values() if not group.is_validation)
        return self._pace.may_start > len(self._uncounted) + promised

    # -- ending --------------------------------------------------------------------------------------------------------

    def opened(self, start: RolloutStart) -> None:
        """The pool has registered the rollout."""
        self._unopened.discard(start)

    def ended(self, start: RolloutStart, status: RolloutStatus | None) -> ScheduledGroup | None:
        """`status` is None for a cancelled rollout. Returns the group if nothing of it is left to start or to wait for.
        Safe to repeat."""
        self._running.discard(start)
        self._unopened.discard(start)
        group = self._groups.get(start.prompt.uid)
        if group is None or start not in group.running:
            return None
        group.running.discard(start)
        if status is RolloutStatus.COMPLETED:
            group.completed += 1
        elif status is RolloutStatus.LATE:
            group.is_released = True
            group.waiting.clear()
        elif status is not None and not group.is_released:
            if start.attempt >= self._retries:
                group.is_given_up = True
                self._given_up.add(group.prompt.uid)
                return self._groups.pop(group.prompt.uid)
            group.waiting.appendleft(start.attempt + 1)
        return None if group.waiting or group.running else self._groups.pop(group.prompt.uid)
