"""The needs of a trainer from a pool, as Protocols. `stepwell.pool.client.DataPool` implements them."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from stepwell.pool.api.leasing import HasLeases
from stepwell.steps.columns import Columns
from stepwell.steps.layout import IndexArray
from stepwell.steps.left_out import LeftOutSteps, WholeGroups
from stepwell.steps.rows import MergedRows


class TrainingBatch(HasLeases, Protocol):
    """Whole groups, or single trajectories or steps as groups of one; part of `stepwell.pool.client.batch.Batch`."""

    @property
    def columns(self) -> Columns: ...

    @property
    def trajectory_of_S(self) -> IndexArray: ...  # noqa: N802

    @property
    def group_of_T(self) -> IndexArray: ...  # noqa: N802

    @property
    def returns_T(self) -> NDArray[np.float64]:  # noqa: N802
        """Each rollout's return; NaN if it is unscored."""

    @property
    def left_out(self) -> LeftOutSteps: ...

    def whole_groups(self) -> WholeGroups: ...

    def merged(self) -> MergedRows: ...


class VersionedPool(Protocol):
    def set_policy_version(self, version: int, *, check: bool = True) -> None:
        """The engines now serve these weights. Without `check` nobody else is asked whether they do."""

    def announce_sync(self) -> None:
        """A trainer lives that brings weights to the engines."""

    def engines(self) -> Sequence[str]:
        """The addresses of the engines that gateways use now."""


class PoolVersion(Protocol):
    @property
    def policy_version(self) -> int: ...


class TrainingPool(VersionedPool, Protocol):
    def fetch_batch(
        self, count: int, *, timeout: float, lease: float | None, channel: str, unit: str = "groups"
    ) -> TrainingBatch:
        """The oldest ready groups, trajectories or steps. FetchTimeout says what is missing."""

    def ack(self, batch: HasLeases) -> None:
        """The batch was trained. LeaseExpired if that took too long: some of it will be leased again."""

    def nack(self, batch: HasLeases) -> None:
        """The batch was not trained: it returns to the head of the queue."""

    def stats(self) -> PoolVersion: ...
