"""Which rollouts to start now. Pure: no clock, no waiting, no HTTP.

What always holds: no more rollouts run than `concurrency`; a group for training is opened only while the pool's pacing
leaves room, and then all of its rollouts may start; a rollout that has started counts from that moment, whether the
pool knows of it yet or not; what is nearly complete comes first; a rollout is tried `retries` times more at most, then
its group is given up; while the gateway does not answer, nothing starts.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from stepwell.agents.dataset import Prompt
from stepwell.agents.rollout import RolloutStatus


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """A rollout to be started."""

    prompt: Prompt
    attempt: int
    is_validation: bool


@dataclass(frozen=True, slots=True)
class StartPace:
    """What the pool says of a channel."""

    may_start: int | None
    """Rollouts that may start; None while the pool does not know."""
    refills: Sequence[tuple[str, int]] = ()
    """Groups that want more rollouts, and how many."""


@dataclass(frozen=True, slots=True)
class GroupEnd:
    """A group that has nothing more to be started or waited for."""

    prompt: Prompt
    is_validation: bool
    completed: int
    is_given_up: bool
    to_cancel: tuple[Start, ...] = ()
    """What still runs of a group that was given up."""


@dataclass(slots=True, eq=False)
class OpenGroup:
    prompt: Prompt
    is_validation: bool
    number: int
    """Order of opening."""
    waiting: deque[int]
    """The rollouts to be started, each as the number of its attempt."""
    running: set[Start] = field(default_factory=set)
    completed: int = 0
    is_let_go: bool = False
    """The pool has shipped or dropped it, or has dropped what was unfinished: it says by itself if it wants more."""

    @property
    def urgency(self) -> tuple[int, int]:
        """Smaller is more urgent: what lacks the fewest rollouts, then what is oldest."""
        return len(self.waiting) + len(self.running), self.number


@dataclass(slots=True)
class Sizes:
    """Rollouts in a group."""

    train: int
    validation: int


class RolloutSchedule:
    def __init__(
        self,
        prompts: Iterator[Prompt],
        find: Callable[[str], Prompt | None],
        sizes: Sizes,
        *,
        concurrency: int,
        retries: int,
        groups: int | None = None,
    ) -> None:
        """`find` gives the prompt of a group that was opened before; `groups` is how many to open for training, and no
        more than there are prompts."""
        self._prompts = prompts
        self._find = find
        self._sizes = sizes
        self._concurrency = concurrency
        self._retries = retries
        self._left = groups
        self._groups: dict[str, OpenGroup] = {}
        self._to_validate: deque[Prompt] = deque()
        self._running: set[Start] = set()
        self._unopened: set[Start] = set()
        """Running, and the pool does not know of them."""
        self._pace: StartPace | None = None
        self._uncounted: list[Start] = []
        """Rollouts for training that the pool's last answer did not count."""
        self._asked_without: list[Start] | None = None
        """The same for the answer that is awaited."""
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

    def ask(self) -> None:
        """The pool is being asked how it is: what starts from now on, it may not have counted."""
        self._asked_without = [start for start in self._unopened if not start.is_validation]

    def answer(self, pace: StartPace | None) -> None:
        """What it said; None if there was no answer."""
        self._pace, self._uncounted, self._asked_without = pace, self._asked_without or [], None
        for prompt_uid, missing in _summed(pace.refills if pace else ()).items():
            self._refill(prompt_uid, missing)

    def _refill(self, prompt_uid: str, missing: int) -> None:
        group = self._groups.get(prompt_uid)
        coming = sum(start.prompt.uid == prompt_uid for start in self._uncounted)
        wanted = missing - coming - (len(group.waiting) if group else 0)
        if wanted <= 0:
            return
        if group is not None:
            group.waiting.extend([0] * wanted)
            group.is_let_go = False
        elif prompt_uid not in self._given_up and (prompt := self._find(prompt_uid)) is not None:
            self._open(prompt, wanted, is_validation=False)

    # -- starting ------------------------------------------------------------------------------------------------------

    def next_starts(self) -> list[Start]:
        """Those to be started now; they count as running."""
        if self._pace is None:
            return []
        starts: list[Start] = []
        for group in sorted(self._groups.values(), key=lambda group: group.urgency):
            starts += self._start(group)
        while self._has_slot() and self._to_validate:
            group = self._open(self._to_validate.popleft(), self._sizes.validation, is_validation=True)
            starts += self._start(group)
        while self._has_slot() and self._may_open():
            starts += self._start(self._open(self._next_prompt(), self._sizes.train, is_validation=False))
        return starts

    def _start(self, group: OpenGroup) -> list[Start]:
        starts = []
        while group.waiting and self._has_slot():
            start = Start(group.prompt, group.waiting.popleft(), group.is_validation)
            group.running.add(start)
            self._running.add(start)
            self._unopened.add(start)
            self._count(start)
            starts.append(start)
        return starts

    def _count(self, start: Start) -> None:
        if start.is_validation:
            return
        self._uncounted.append(start)
        if self._asked_without is not None:
            self._asked_without.append(start)

    def _open(self, prompt: Prompt, size: int, *, is_validation: bool) -> OpenGroup:
        self._opened += 1
        group = OpenGroup(prompt, is_validation, self._opened, deque([0] * size))
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

    def _next_prompt(self) -> Prompt:
        self._left = None if self._left is None else self._left - 1
        return next(self._prompts)

    # -- ending --------------------------------------------------------------------------------------------------------

    def opened(self, start: Start) -> None:
        """The pool knows of it."""
        self._unopened.discard(start)

    def ended(self, start: Start, status: RolloutStatus | None) -> GroupEnd | None:
        """How a rollout ended, None if it was cancelled; gives the group's end if that is it. Safe to repeat."""
        self._running.discard(start)
        self._unopened.discard(start)
        group = self._groups.get(start.prompt.uid)
        if group is None or start not in group.running:
            return None
        group.running.discard(start)
        if status is RolloutStatus.COMPLETED:
            group.completed += 1
        elif status is RolloutStatus.LATE:
            group.is_let_go = True
            group.waiting.clear()
        elif status is not None and not group.is_let_go:
            if start.attempt >= self._retries:
                return self._close(group, is_given_up=True)
            group.waiting.appendleft(start.attempt + 1)
        return None if group.waiting or group.running else self._close(group, is_given_up=False)

    def _close(self, group: OpenGroup, *, is_given_up: bool) -> GroupEnd:
        del self._groups[group.prompt.uid]
        if is_given_up:
            self._given_up.add(group.prompt.uid)
        return GroupEnd(group.prompt, group.is_validation, group.completed, is_given_up, tuple(group.running))


def _summed(refills: Sequence[tuple[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for prompt_uid, missing in refills:
        total[prompt_uid] += missing
    return total
