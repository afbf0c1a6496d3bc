"""The shapes an export can have, each as tables and as lines: steps, examples to imitate, pairs to prefer by.

What always holds: ids are those that were sampled, in every shape; texts are decoded from them, with the marks of the
chat template, and only where there is a tokenizer. An agent's side calls are no example of its task.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from stepwell.steps.columns import Columns, unpack
from stepwell.steps.groups import StepGroup
from stepwell.steps.json_lines import Record, step_records
from stepwell.steps.step import Step
from stepwell.steps.tables import Tables, steps_table

if TYPE_CHECKING:
    import pyarrow

SIDE_CALL = "side_call"


class Shape(Protocol):
    """Each is called once a page of groups, in order, for the one or for the other."""

    def table(self, groups: Sequence[StepGroup]) -> "pyarrow.Table": ...

    def records(self, groups: Sequence[StepGroup]) -> Iterator[Record]: ...


class Steps:
    """All that is known, exactly. The only shape that can be read back."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._groups = 0

    def table(self, groups: Sequence[StepGroup]) -> "pyarrow.Table":
        first, self._groups = self._groups, self._groups + len(groups)
        return steps_table(self._tables, groups, first)

    def records(self, groups: Sequence[StepGroup]) -> Iterator[Record]:
        for group in groups:
            yield from step_records(self._tables.schema, group, self._groups)
            self._groups += 1


def task_steps(columns: Columns) -> list[Step]:
    """Those of a trajectory that are no side calls."""
    steps = unpack(columns, copy=False)
    return [step for step in steps if not (step.untrainable or "").startswith(SIDE_CALL)]


def return_of(steps: Iterable[Step]) -> float | None:
    """What a trajectory earned; None if no one has scored it."""
    rewards = [step.reward for step in steps if step.reward is not None]
    return sum(rewards) if rewards else None


def table_of(records: Iterable[Record], types: "dict[str, pyarrow.DataType]") -> "pyarrow.Table":
    import pyarrow as pa

    rows = list(records)
    arrays: dict[str, Any] = {name: pa.array([row[name] for row in rows], kind) for name, kind in types.items()}
    return pa.table(arrays)
