"""The shapes of a row of an export, as a table and as JSON lines. This file has the shape `steps`.

Invariants:
- Token ids are the sampled ones in every shape. Texts are decoded from them, with the markers of the chat template, and
  only if there is a tokenizer.
- Side calls of an agent, and answers that nobody read, are no examples of its task.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from stepwell.steps.arrow import step_groups_to_arrow
from stepwell.steps.columns import Columns, unpack
from stepwell.steps.groups import StepGroup
from stepwell.steps.json_lines import Record, step_records
from stepwell.steps.step import Step
from stepwell.steps.trainable import ASIDE, fault_kind

if TYPE_CHECKING:
    import pyarrow


class ExportShape(Protocol):
    """One of the two is called, once for each page of groups, in order."""

    def table(self, groups: Sequence[StepGroup]) -> "pyarrow.Table": ...

    def records(self, groups: Sequence[StepGroup]) -> Iterator[Record]: ...


class StepsShape:
    """All columns of a step. The only shape that can be imported."""

    def __init__(self) -> None:
        self._groups = 0

    def table(self, groups: Sequence[StepGroup]) -> "pyarrow.Table":
        first, self._groups = self._groups, self._groups + len(groups)
        return step_groups_to_arrow(groups, first)

    def records(self, groups: Sequence[StepGroup]) -> Iterator[Record]:
        for group in groups:
            yield from step_records(group, self._groups)
            self._groups += 1


def task_steps(columns: Columns) -> list[Step]:
    """The steps of a trajectory without those that are aside."""
    steps = unpack(columns, copy=False)
    return [step for step in steps if fault_kind(step.untrainable or "") not in ASIDE]


def table_of(records: Iterable[Record], types: "dict[str, pyarrow.DataType]") -> "pyarrow.Table":
    import pyarrow as pa

    return pa.Table.from_pylist(list(records), pa.schema(types))
