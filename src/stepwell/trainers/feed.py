# ruff: noqa: N802 - arrays carry their shape in the name, properties too
"""The way of data from the pool through a trainer: lease, rows, weights, checkpoint, acknowledgement.

Invariants:
- A lease is in one place: leased without rows yet, in hand (the trainer has its rows), trained (in the weights), or in
  the ledger (kept, and not acknowledged yet). The trainer says when it moves on.
- Only what is in the ledger is acknowledged: the trainer says that a checkpoint with it is on disk, or that there are
  no checkpoints.
- Rollouts that come back although they are in hand, trained or kept are known by their names, and not trained again.
- Rows that teach nothing are counted (trainers/reporting.py), and their leases go the same way as all others.
- One thread may take batches while another one counts them as trained.
"""

import json
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from stepwell.common.files import replacing_file
from stepwell.errors import BadRequest, FetchTimeout, LeaseExpired, PoolUnavailable, StepwellError
from stepwell.pool.api.leasing import HasLeases
from stepwell.pool.client import DataPool
from stepwell.steps.advantages import NO_PAST, RunningStatistics, statistics_of
from stepwell.steps.columns import Columns, stack
from stepwell.steps.layout import IndexArray, firsts_of
from stepwell.steps.returns import LeftOutSteps, WholeGroups, join_left_out, whole_groups
from stepwell.steps.rows import MergedRows, merge_rows
from stepwell.trainers.ports import TrainingBatch
from stepwell.trainers.reporting import LearningMonitor
from stepwell.trainers.rows import TrainedRows, choose_rows
from stepwell.trainers.settings import FeedSettings

log = logging.getLogger("stepwell.trainers")

REMEMBERED = 10_000
"""Acknowledged rollouts whose names are kept: a pool that restarts may have missed an acknowledgement."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LeasedRollouts:
    """The leases of a batch, without its arrays: it is held until a checkpoint contains it."""

    leases: tuple[tuple[str, str], ...]
    uids: tuple[str, ...]
    """The rollouts that count as trained with the batch; the steps, if these are the unit."""
    statistics: RunningStatistics
    """Statistics of the rewards up to this batch."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ChosenBatch:
    """A leased batch and the rows that are trained of it."""

    batch: TrainingBatch
    rows: TrainedRows
    rollouts: LeasedRollouts
    refills: int = 0
    """How often more groups were fetched in place of those that teach nothing."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FeedState:
    """The state of the pool's data that a checkpoint names."""

    leases: list[tuple[str, str]]
    """Leases of trained batches that were not acknowledged when this was written."""
    trajectories: list[str]
    """The last trained rollouts, the oldest first: those of the leases above, and many before them."""
    statistics: dict[str, list[float]] = field(default_factory=dict)
    """RunningStatistics of the rewards of earlier batches."""


class TrainedLedger:
    """The leases that are trained and not acknowledged, and the names of the rollouts trained last."""

    def __init__(self, open_leases: Iterable[tuple[str, str]] = (), trained: Iterable[str] = ()) -> None:
        self._leases = [(str(shard), str(lease)) for shard, lease in open_leases]
        self._trained = OrderedDict.fromkeys(trained)

    def __contains__(self, trajectory_uid: object) -> bool:
        return trajectory_uid in self._trained

    @property
    def leases(self) -> tuple[tuple[str, str], ...]:
        return tuple(self._leases)

    @property
    def trained(self) -> list[str]:
        """The names, the oldest first."""
        return list(self._trained)

    def add(self, leases: Iterable[tuple[str, str]], trained: Sequence[str]) -> None:
        self._leases += leases
        self._trained.update(OrderedDict.fromkeys(trained))

    def acknowledge(self, pool: DataPool) -> None:
        """Acknowledge the open leases. Those of a pool that is away stay open: the next call tries them again."""
        if not self._leases:
            return
        try:
            pool.ack(self)
        except PoolUnavailable as away:
            log.warning("%d leases will be acknowledged later: %s", len(self._leases), away)
            return
        except LeaseExpired:
            log.warning("a lease expired before its batch was acknowledged; it comes back and is skipped")
        self._leases = []
        while len(self._trained) > REMEMBERED:
            self._trained.popitem(last=False)


class Feed:
    """Leases batches of `pool` for one trainer, chooses their rows, and acknowledges what the trainer has kept.

    `unit` is what a batch is called if too many in a row teach nothing.
    """

    def __init__(self, pool: DataPool, settings: FeedSettings, unit: str = "batches") -> None:
        self.monitor = LearningMonitor(settings.max_unlearnable, unit)
        """The monitor, to be asked after each batch: NothingLearned ends a training that learns nothing."""
        self.leased: deque[TrainingBatch] = deque()
        """Batches whose rows are not chosen yet, the oldest first. A trainer may append what it has leased itself."""
        self._pool = pool
        self._settings = settings
        self._lock = Lock()
        """Held to move leases on, not for calls to the pool."""
        self._in_hand: list[LeasedRollouts] = []
        self._trained: list[LeasedRollouts] = []
        self._uids: set[str] = set()
        """The names of what is in hand or trained."""
        self._ledger = TrainedLedger()
        self._statistics = NO_PAST
        """Statistics of the rewards of all that is trained."""

    def __contains__(self, uid: object) -> bool:
        """Whether the trainer has this rollout, or had it."""
        return uid in self._uids or uid in self._ledger

    # -- taking --------------------------------------------------------------------------------------------------------

    def take(self, count: int, *, refills: int = 0) -> ChosenBatch:
        """Lease a batch and choose its rows.

        Up to `refills` times, more groups are leased in place of those that teach nothing. If there are no more in
        time, the batch is what there is. FetchTimeout says what is missing.
        """
        with self.returned_on_failure():
            self.fetch(count)
            chosen = self.choose()
            while chosen.refills < refills and (missing := count - chosen.rows.groups_trained) > 0:
                try:
                    self.fetch(missing)
                except FetchTimeout as timeout:
                    log.warning("%d groups teach nothing and are not replaced: %s", missing, timeout)
                    break
                chosen = self._join(chosen)
            return chosen

    def take_new(self, count: int, settle: Callable[[], object], *, refills: int = 0) -> ChosenBatch:
        """Take a batch with something new: rollouts may come back that were trained under a lease that expired. A batch
        without anything new counts as trained, and `settle` is called to acknowledge it."""
        while True:
            chosen = self.take(count, refills=refills)
            if chosen.rows.is_new_T.any():
                return chosen
            self.count_as_trained()
            settle()

    def fetch(self, count: int, *, timeout: float | None = None) -> TrainingBatch:
        """Lease a batch; `choose` gives its rows. `timeout` takes the place of the settings' one."""
        settings = self._settings
        batch = self._pool.fetch_batch(
            count,
            timeout=settings.fetch_timeout if timeout is None else timeout,
            lease=settings.lease,
            channel=settings.channel,
            unit=settings.unit,
        )
        self.leased.append(batch)
        return batch

    def choose(self, unwanted: Container[str] = ()) -> ChosenBatch:
        """The rows of the oldest leased batch, which is in hand then. Groups with an unwanted rollout are not trained,
        like those that were trained before."""
        batch = self.leased[0]
        with self._lock:
            past = self._in_hand[-1].statistics if self._in_hand else self._statistics
        rows = choose_rows(batch, _Either(self, unwanted), self._settings, past)
        rollouts = LeasedRollouts(leases=batch.leases, uids=rows.uids, statistics=rows.statistics)
        with self._lock:
            self.leased.popleft()
            self._in_hand.append(rollouts)
            self._uids.update(rollouts.uids)
        return ChosenBatch(batch=batch, rows=rows, rollouts=rollouts)

    def _join(self, chosen: ChosenBatch) -> ChosenBatch:
        """The rows of this batch and the leased one together."""
        with self._lock:
            self._in_hand.remove(chosen.rollouts)
            self._uids.difference_update(chosen.rollouts.uids)
            self.leased.append(JoinedBatch([chosen.batch, self.leased.pop()]))
        return replace(self.choose(), refills=chosen.refills + 1)

    # -- moving on -----------------------------------------------------------------------------------------------------

    def count_as_trained(self, *rollouts: LeasedRollouts) -> None:
        """Counts these as part of the weights now; all that is in hand, if none are named."""
        with self._lock:
            for each in rollouts or tuple(self._in_hand):
                self._in_hand.remove(each)
                self._trained.append(each)
                self._statistics = each.statistics

    @property
    def has_open_leases(self) -> bool:
        """Whether something trained is not acknowledged yet."""
        return bool(self._trained or self._ledger.leases)

    def acknowledge(self) -> None:
        """Keeps what is trained: a checkpoint with it is on disk, or there are no checkpoints. It does not come back.
        If the pool is away, the next call tells it."""
        with self._lock:
            for each in self._trained:
                self._ledger.add(each.leases, each.uids)
                self._uids.difference_update(each.uids)
            self._trained = []
        self._ledger.acknowledge(self._pool)

    def give_back(self, *, also_trained: bool = False) -> None:
        """Return what is not trained to the pool. With `also_trained` the weights are lost, and what was trained since
        the last acknowledgement returns too."""
        with self._lock:
            returned: list[HasLeases] = [*self._in_hand, *self.leased]
            if also_trained:
                returned, self._trained = [*self._trained, *returned], []
            self._in_hand = []
            self._uids = {uid for each in self._trained for uid in each.uids}
            self.leased.clear()
        for each in returned:
            with suppress(StepwellError):  # the leases expire by themselves
                self._pool.nack(each)

    @contextmanager
    def returned_on_failure(self) -> Iterator[None]:
        """Returns what is not trained to the pool if the block fails."""
        try:
            yield
        except BaseException:
            self.give_back()
            raise

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state(self, *also: LeasedRollouts) -> FeedState:
        """The state for a checkpoint of the weights as they are now. `also` are in them too, though they do not count
        as trained yet."""
        with self._lock:
            trained = [*self._trained, *also]
            return FeedState(
                leases=[*self._ledger.leases, *(lease for each in trained for lease in each.leases)],
                trajectories=[*self._ledger.trained, *(uid for each in trained for uid in each.uids)],
                statistics=(also[-1].statistics if also else self._statistics).as_numbers(),
            )

    def restore(self, state: FeedState) -> None:
        """Continue from a checkpoint. What it contains is acknowledged with the next call of `acknowledge`."""
        self._ledger = TrainedLedger(state.leases, state.trajectories)
        self._statistics = statistics_of(state.statistics)

    def unseen_version(self, version: int) -> int:
        """The given version, or, if the pool has had a newer one, a number that no other weights have had."""
        newest = self._pool.stats().policy_version
        return version if newest <= version else newest + 1


@dataclass(frozen=True, slots=True)
class _Either:
    """The names that are in one of two containers."""

    first: Container[str]
    second: Container[str]

    def __contains__(self, name: object) -> bool:
        return name in self.first or name in self.second


S = TypeVar("S", bound=FeedState)


def write_state(file: Path, state: FeedState) -> None:
    """Writes the state as JSON. The file is whole or absent, at whatever moment the process dies."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing_file(file) as opened:
        opened.write(json.dumps(asdict(state)).encode())


def read_state(kind: type[S], file: Path) -> S | None:
    """The state in the file; None if there is no file."""
    if not file.exists():
        return None
    values = json.loads(file.read_bytes())
    if not isinstance(values, dict) or values.keys() != {of.name for of in fields(kind)}:
        raise BadRequest(f"{file} is not the record of a run; name another folder to start anew")
    leases = [(str(shard), str(lease)) for shard, lease in values["leases"]]
    return kind(**values | {"leases": leases})


class JoinedBatch:
    """Several fetched batches as one, which is trained and acknowledged as a whole: the groups of the first part, then
    those of the second, … Two parts share no group."""

    def __init__(self, parts: Sequence[TrainingBatch]) -> None:
        self._parts = parts

    @property
    def leases(self) -> tuple[tuple[str, str], ...]:
        return tuple(lease for part in self._parts for lease in part.leases)

    @cached_property
    def columns(self) -> Columns:
        return stack([part.columns for part in self._parts])

    @cached_property
    def trajectory_of_S(self) -> IndexArray:
        return _counted_on([part.trajectory_of_S for part in self._parts])

    @cached_property
    def group_of_T(self) -> IndexArray:
        return _counted_on([part.group_of_T for part in self._parts])

    @cached_property
    def returns_T(self) -> NDArray[np.float64]:
        return np.concatenate([part.returns_T for part in self._parts])

    @cached_property
    def left_out(self) -> LeftOutSteps:
        return join_left_out([part.left_out for part in self._parts], [_count(part.group_of_T) for part in self._parts])

    def whole_groups(self) -> WholeGroups:
        return self._whole_groups

    @cached_property
    def _whole_groups(self) -> WholeGroups:
        uids_T = [self.columns.trajectory_uids[first] for first in firsts_of(self.trajectory_of_S).tolist()]
        return whole_groups(self.left_out, uids_T, self.group_of_T, self.returns_T)

    def merged(self) -> MergedRows:
        return merge_rows(self.columns, self.trajectory_of_S, self.group_of_T)


def _counted_on(parts: Sequence[IndexArray]) -> IndexArray:
    """The numbers of a later part follow those of the parts before it."""
    firsts = np.cumsum([0, *map(_count, parts)])
    return np.concatenate([numbers + first for numbers, first in zip(parts, firsts, strict=False)])


def _count(numbers: IndexArray) -> int:
    return int(numbers.max(initial=-1)) + 1
