"""Writes docs/seeds.md from seeds.toml: what the documents promise that Stepwell was built from, and what shows it.

A test keeps it up to date.

python scripts/seeds.py
"""

import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).with_name("seeds.toml")
PAGE = Path(__file__).parents[1] / "docs" / "seeds.md"
STATES = ("exact", "other", "partly")
HEAD = """# What Claw-R1's and Atropos' documents promise, row by row

Written by `scripts/seeds.py` from `scripts/seeds.toml`.

Stepwell was built from four documents: those of [Claw-R1](https://github.com/AgentR1/Claw-R1) on its gateway server and
its middleware layer, and those of [Atropos](https://github.com/NousResearch/atropos) on the protocol of a rollout
handler and on BaseEnv. Every promise of them is a row here, in our words: a route, a field, a flag, a default or a
behaviour. A test of this repository shows each row. Where the documents have examples, tests run them as they stand
there.

- **exact**: it is there under the documented name, and behaves as described. What it does beyond that is on the
  pages for those who [come from Claw-R1](coming-from-claw-r1.md) or [from Atropos](coming-from-atropos.md).
- **other**: it is there under another name, in another place or with another default, for the reason given.
- **partly**: a part of it is not there, for the reason given.

"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    promise: str
    state: str
    tests: list[str]
    here: str = ""
    """How it is called here, if there is more to say."""
    why: str = ""
    """Why it is not exact."""

    def line(self, number: str) -> str:
        words = "; because ".join(filter(None, (self.here, self.why)))
        shown = ", ".join(f"`{name}`" for name in self.tests)
        return f"| {number} | {self.promise} | {self.state} | {words} | {shown} |"


@dataclass(frozen=True, slots=True)
class Document:
    letter: str
    title: str
    rows: list[Row]

    def section(self) -> str:
        lines = [row.line(f"{self.letter}{number}") for number, row in enumerate(self.rows, 1)]
        head = ("| | promised | state | here | shown by |", "|---|---|---|---|---|")
        return "\n".join((f"\n## {self.title}\n", *head, *lines)) + "\n"

    def summary(self) -> str:
        states = Counter(row.state for row in self.rows)
        return f"| {self.title} | {len(self.rows)} | {' | '.join(str(states[state]) for state in STATES)} |"


def documents() -> list[Document]:
    data: dict[str, Any] = tomllib.loads(DATA.read_text())
    return [
        Document(each["letter"], each["title"], [Row(**row) for row in data[each["rows"]]]) for each in data["document"]
    ]


def page() -> str:
    found = documents()
    everything = Document("", "all", [row for document in found for row in document.rows])
    head = (f"| | rows | {' | '.join(STATES)} |", "|---|---|---|---|---|")
    summary = "\n".join((*head, *(document.summary() for document in (*found, everything))))
    return f"{HEAD}{summary}\n{''.join(document.section() for document in found)}"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
