"""What the doctor found: checks, each with a verdict, and a table of cases, each cell of which is a verdict too.

What always holds: a finding that is not fine says why and what to do; what could not be found out is never called fine.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum


class Mark(StrEnum):
    EXACT = "exact"
    """Proved, token for token."""
    OK = "ok"
    WARNING = "warning"
    """Works, and costs something that its reader should know of."""
    FAULT = "fault"
    UNTOLD = "–"
    """Does not apply, or could not be found out; why says which, unless it is plain."""


@dataclass(frozen=True, slots=True)
class Finding:
    mark: Mark
    what: str = ""
    """What was seen; for a cell of the table, why it is not exact."""
    remedy: str = ""
    """What to do about it."""


EXACT = Finding(Mark.EXACT)
NOTHING = Finding(Mark.UNTOLD)


class Column(StrEnum):
    """What is asked of a case."""

    IDS = "ids"
    """The engine's own, as many as it counts itself."""
    LOGPROBS = "logprobs"
    """One for each id, finite, none above 0."""
    TEXT = "text"
    """The ids spell what the agent was told."""
    STREAM = "stream"
    """Streamed, it is the same."""
    PREFIX = "prefix"
    """The next turn's prompt begins with this turn's prompt and response."""
    RESCORED = "rescored"
    """The engine, asked again for the log-probabilities of these very tokens, gives the same."""


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    finding: Finding


@dataclass(frozen=True, slots=True)
class Row:
    """One case; a column that is missing does not apply to it."""

    case: str
    cells: Mapping[Column, Finding]

    def cell(self, column: Column) -> Finding:
        return self.cells.get(column, NOTHING)

    def with_cell(self, column: Column, finding: Finding) -> "Row":
        return Row(self.case, {**self.cells, column: finding})


CANNOT_TELL = (
    "what only shows under load, with long prompts, or during a weight update: few, short calls were made, one by one",
    "whether the weights are the ones you mean: a weight sync proves that with its probe",
    "whether tokens are drawn fairly: only that their log-probabilities are the model's own",
)
"""What no call from outside can show."""


@dataclass(frozen=True, slots=True)
class Report:
    engine: str
    checks: tuple[Check, ...]
    rows: tuple[Row, ...] = ()
    """Empty where the engine could not be asked."""

    def with_checks(self, more: Iterable[Check]) -> "Report":
        return replace(self, checks=(*self.checks, *more))

    @property
    def is_exact(self) -> bool:
        """No fault anywhere, and ids and log-probabilities proved in every case."""
        proved = {row.cell(column).mark for row in self.rows for column in (Column.IDS, Column.LOGPROBS)}
        return proved == {Mark.EXACT} and not any(self.faults())

    def faults(self) -> Iterator[Finding]:
        return (finding for _, finding in self.remarks() if finding.mark is Mark.FAULT)

    def remarks(self) -> Iterator[tuple[str, Finding]]:
        """All that is not simply fine, by the name of its check, or its case and column."""
        for check in self.checks:
            if check.finding.mark in (Mark.WARNING, Mark.FAULT):
                yield check.name, check.finding
        for row in self.rows:
            for column, finding in row.cells.items():
                if finding.mark is not Mark.EXACT and finding.what:
                    yield f"{row.case}, {column}", finding
