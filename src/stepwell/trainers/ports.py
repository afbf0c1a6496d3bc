"""The parts of batches and engine lists that trainers use, as Protocols."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from stepwell.pool.api.leasing import HasLeases
from stepwell.steps.columns import Columns
from stepwell.steps.layout import IndexArray
from stepwell.steps.returns import LeftOutSteps, WholeGroups
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
    """A DataPool, or the engines of one version that the guard has staged."""

    def set_policy_version(self, version: int, *, check: bool = True) -> None:
        """The engines now serve these weights. Without `check` nobody else is asked whether they do."""

    def announce_sync(self) -> None:
        """A trainer lives that brings weights to the engines."""

    def engines(self) -> Sequence[str]:
        """The addresses of the engines that gateways use now."""
