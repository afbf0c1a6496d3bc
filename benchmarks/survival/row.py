"""A row of the table: one fault, the figures that were measured, and their goals.

A new row is a class in a new file and an entry in rows.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class RowOutcome:
    figures: Mapping[str, float]
    at_most: Mapping[str, float] = field(default_factory=dict)
    at_least: Mapping[str, float] = field(default_factory=dict)

    @property
    def missed(self) -> list[str]:
        most = [name for name, bound in self.at_most.items() if self.figures[name] > bound]
        return most + [name for name, bound in self.at_least.items() if self.figures[name] < bound]


class SurvivalRow(Protocol):
    @property
    def name(self) -> str:
        """For --only."""

    @property
    def fault(self) -> str:
        """What happens, in one line."""

    async def run(self, *, quick: bool) -> RowOutcome:
        """`quick` is a shorter form for tests. A figure that could not be measured is infinite."""
