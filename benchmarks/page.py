"""Writes docs/benchmarks.md from benchmarks/results/, and the figures that both READMEs quote. A test keeps them up to
date.

    python -m benchmarks.page
"""

import re
from collections.abc import Mapping, Sequence

from benchmarks.results import CHECKOUT, NEVER, Result, read_results
from benchmarks.table import BENCHMARKS, OURS, QUOTED, Benchmark

PAGE = CHECKOUT / "docs" / "benchmarks.md"
READMES = (CHECKOUT / "README.md", CHECKOUT / "README.zh.md")
NOT_RUN, NOT_MEASURED = "not run yet", "not measured yet"
NUMBER = re.compile(rf"\*\*(?:[\d.,]+|{NOT_MEASURED})\*\*")

Results = Mapping[str, Result]

HEAD = """# Benchmarks

What Stepwell costs, and what it withstands. Every benchmark is one command with targets. Some targets are missed, and
this page says which.

```bash
just bench                  # all; some hours on two cores
just bench --resume         # go on after an interruption: what was measured within a day is kept
just bench pool gateway     # these
just bench-page             # this page, from what the last runs gave
```

- `just bench` ends with a table of all targets. It keeps what each benchmark gave in `benchmarks/results/`, with the
  date, the commit, the machine and the command. This page is written from these files, and a test checks that it is
  what they give.
- Compare the figures of one line: they were measured in turns on the same machine, so that other work on it affects all
  alike. Absolute figures are those of that machine. *Load* is the number of processes that wanted a core when the
  benchmark began.
- Other projects' code runs unchanged, in a published version (`scripts/peer_envs.py`, `scripts/atropos_env.py`,
  `scripts/trainer_envs.py`).
"""


def page(results: Results) -> str:
    parts = [
        HEAD.rstrip(),
        overview(results),
        missed(results),
        *(section(row, results.get(row.name)) for row in BENCHMARKS),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def overview(results: Results) -> str:
    rows = [(f"[{row.name}](#{row.name})", row.measures, *_state(results.get(row.name))) for row in BENCHMARKS]
    return "## All benchmarks\n\n" + _table(("benchmark", "what it measures", "targets met", "run"), rows)


def _state(result: Result | None) -> tuple[str, str]:
    if result is None:
        return "–", NOT_RUN
    if result.failure:
        return "failed", _day(result)
    met = list(result.targets_met().values())
    return (f"{sum(met)} of {len(met)}" if met else "no targets"), _day(result)


def _day(result: Result) -> str:
    return result.date.partition(" ")[0]


def missed(results: Results) -> str:
    rows = [
        (f"[{row.name}](#{row.name})", f"`{figure}`", number(result.figures[figure]), _target(result, figure))
        for row in BENCHMARKS
        if (result := results.get(row.name)) is not None
        for figure in result.missed
    ]
    told = (
        _table(("benchmark", "figure", "value", "target"), rows) if rows else "None, of the benchmarks that were run."
    )
    return f"## Missed targets\n\n{told}"


def section(row: Benchmark, result: Result | None) -> str:
    parts = [f"## {row.name}", row.measures]
    if result is None:
        hours = " It takes hours." if row.is_by_name_only else ""
        parts.append(f"*Not run yet*: `{' '.join(('python', *row.command))}`.{hours}")
    elif result.failure:
        parts += [_run(result), f"**The last run failed**: {result.failure}."]
    else:
        parts += [_first(row, result), _run(result), _targets(result), _all(result)]
    return "\n\n".join(filter(None, parts))


def _first(row: Benchmark, result: Result) -> str:
    """The figures that are shown first, side by side."""
    others = list(dict.fromkeys(whose for shown in row.shown for whose in shown.beside))
    lines = [
        (
            shown.what,
            *(_figure(result, name) for name in (shown.figure, *(shown.beside.get(whose) for whose in others))),
        )
        for shown in row.shown
    ]
    return _table(("", OURS, *others), lines) if lines else ""


def _figure(result: Result, name: str | None) -> str:
    return number(result.figures[name]) if name is not None and name in result.figures else "–"


def _run(result: Result) -> str:
    machine = result.machine
    told = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB, Python {machine['python']}"
    commit = result.commit or "not recorded"
    return f"{result.date}, commit {commit}, {told}, load {machine['load']}: `{result.command}`"


def _targets(result: Result) -> str:
    rows = [
        (f"`{figure}`", number(result.figures[figure]), _target(result, figure), "met" if is_met else "**missed**")
        for figure, is_met in result.targets_met().items()
    ]
    return _table(("target of", "value", "target", ""), rows) if rows else ""


def _target(result: Result, figure: str) -> str:
    return result.targets[figure].replace("<=", "≤").replace(">=", "≥")


def _all(result: Result) -> str:
    others = [f"`{name}` {number(value)}" for name, value in result.figures.items() if name not in result.targets]
    return f"Further figures: {', '.join(others)}." if others else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def number(value: float, digits: int = 6) -> str:
    if value >= NEVER:
        return "not measured"
    return f"{value:,.0f}" if value == round(value) or value >= 10**digits else f"{value:.{digits}g}"


def with_figures(readme: str, results: Results) -> str:
    """The README with the bold numbers of each item that quotes a benchmark."""
    for name, figures in QUOTED.items():
        (item,) = re.findall(rf"^- (?:(?!\n- |\n\n).)*?benchmarks\.md#{name}\).*?$", readme, re.M | re.S)
        values = iter(_quoted(results.get(name), figures))
        assert len(NUMBER.findall(item)) == len(figures), f"the item on {name} has other bold numbers than {figures}"
        readme = readme.replace(item, NUMBER.sub(lambda _, values=values: f"**{next(values)}**", item))  # type: ignore[misc]
    return readme


def _quoted(result: Result | None, figures: Sequence[str]) -> list[str]:
    known = {} if result is None else result.figures
    return [number(known[figure], digits=3) if figure in known else NOT_MEASURED for figure in figures]


def main() -> None:
    results = read_results()
    PAGE.write_text(page(results))
    for readme in READMES:
        readme.write_text(with_figures(readme.read_text(), results))
    print(f"wrote {', '.join(str(file.relative_to(CHECKOUT)) for file in (PAGE, *READMES))}")


if __name__ == "__main__":
    main()
