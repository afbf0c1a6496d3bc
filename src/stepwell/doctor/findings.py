"""The findings of the doctor: checks, and a table of cases. Each check and each cell of the table is a finding.

- A warning or a fault says what is wrong and what to do.
- A fact that could not be found out is never graded as fine.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeAlias


class Grade(StrEnum):
    EXACT = "exact"
    """Proved, token for token."""
    OK = "ok"
    WARNING = "warning"
    """The examined part works, but with a disadvantage."""
    FAULT = "fault"
    UNKNOWN = "–"
    """The question does not apply, or could not be answered."""


@dataclass(frozen=True, slots=True)
class Finding:
    grade: Grade
    what: str = ""
    """The observation; in a cell of the table, why it is not exact."""
    remedy: str = ""
    """The remedy, as an instruction."""


EXACT = Finding(Grade.EXACT)
NOTHING = Finding(Grade.UNKNOWN)


class CaseColumn(StrEnum):
    """A property that is checked in each case."""

    IDS = "ids"
    """The engine returned token ids, as many as it counts in usage."""
    LOGPROBS = "logprobs"
    """One log-probability per id; each is finite and at most 0."""
    TEXT = "text"
    """The ids decode to the text that the agent got."""
    STREAM = "stream"
    """A streamed answer is equal to the whole answer."""
    PREFIX = "prefix"
    """The next turn's prompt starts with this turn's prompt and response."""
    RESCORED = "rescored"
    """The engine computes the same log-probabilities for these tokens again."""


CaseCells: TypeAlias = Mapping[CaseColumn, Finding]
"""The findings of one case; a missing column does not apply to it."""


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    finding: Finding


@dataclass(frozen=True, slots=True)
class CaseRow:
    case: str
    cells: CaseCells

    def cell(self, column: CaseColumn) -> Finding:
        return self.cells.get(column, NOTHING)


CANNOT_TELL = (
    "faults that appear only under load, with long prompts, or during a weight update: the calls were few, short, and "
    "one at a time",
    "whether the weights are the ones you expect: a weight sync checks that with its probe",
    "whether tokens are sampled correctly: only their log-probabilities are checked",
)
"""The faults that calls from outside cannot show."""


@dataclass(frozen=True, slots=True)
class Report:
    engine: str
    checks: tuple[Check, ...]
    rows: tuple[CaseRow, ...] = ()
    """Empty if the engine could not be called."""
    missing: tuple[str, ...] = ()
    """The capabilities that the engine lacks, with their cost and what to do, as `stepwell up` says it."""

    def with_checks(self, more: Iterable[Check]) -> "Report":
        return replace(self, checks=(*self.checks, *more))

    @property
    def is_exact(self) -> bool:
        """Whether there is no fault, and ids and log-probabilities are proved in every case."""
        proved = {row.cell(column).grade for row in self.rows for column in (CaseColumn.IDS, CaseColumn.LOGPROBS)}
        return proved == {Grade.EXACT} and not any(self.faults())

    def faults(self) -> Iterator[Finding]:
        cells = (finding for row in self.rows for finding in row.cells.values())
        findings = (*(check.finding for check in self.checks), *cells)
        return (finding for finding in findings if finding.grade is Grade.FAULT)
