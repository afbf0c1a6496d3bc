"""All benchmarks are in one table, which is run as a whole; the page and the READMEs have the kept figures."""

import json
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import results
from benchmarks.__main__ import chosen, conclude, recent, run_all
from benchmarks.page import PAGE, READMES, number, page, with_figures
from benchmarks.results import FOLDER, Result, closing_line, commit, machine, read_results
from benchmarks.table import BENCHMARKS, QUOTED, Benchmark
from rig.docs_pages import CHECKOUT, slugs

MACHINE = {"cpu", "cores", "memory_gb", "python", "load"}


def made_up(name: str, asked: str, minutes: float = 1.0) -> Benchmark:
    module = "benchmarks.tests.made_up_benchmark"
    return Benchmark(name=name, measures="Nothing.", shown=(), minutes=minutes, module=module, arguments=(asked,))


def test_every_benchmark_is_in_the_table() -> None:
    files = [*(CHECKOUT / "benchmarks").glob("*.py"), *(CHECKOUT / "benchmarks").glob("*/__main__.py")]
    written = {
        ".".join(file.relative_to(CHECKOUT).with_suffix("").parts).removesuffix(".__main__")
        for file in files
        if re.search(r"^from benchmarks\.report import .*\breport$", file.read_text(), re.M)
    }
    assert {benchmark.command[1] for benchmark in BENCHMARKS} == written
    names = [benchmark.name for benchmark in BENCHMARKS]
    assert len(set(names)) == len(names)
    assert all(find_spec(module) for module in written)


@pytest.mark.parametrize("module", sorted({benchmark.command[1] for benchmark in BENCHMARKS}))
def test_a_benchmark_reads_its_command_line_so_that_help_starts_nothing(module: str) -> None:
    spec = find_spec(f"{module}.__main__" if (CHECKOUT / module.replace(".", "/")).is_dir() else module)
    assert spec is not None
    assert spec.origin is not None
    assert re.search(r"\bparse_args\(|\bparse_no_options\(__doc__\)", Path(spec.origin).read_text())


def test_kept_results_are_of_benchmarks_in_the_table_and_have_the_figures_that_it_shows() -> None:
    rows = {benchmark.name: benchmark for benchmark in BENCHMARKS}
    for name, result in read_results().items():
        assert result.name == name
        assert result.command.startswith(" ".join(("python", *rows[name].command)))  # more if it is of several runs
        assert result.failure or {shown.figure for shown in rows[name].shown} <= result.figures.keys()


def test_a_kept_result_says_which_machine_and_names_no_host_and_no_path() -> None:
    assert machine().keys() == MACHINE
    for file in FOLDER.glob("*.json"):
        assert Result.read(file).machine.keys() == MACHINE
        assert re.search(r"(?<!\w)/\w+/", file.read_text()) is None, file.name


def test_the_page_is_what_the_kept_results_give() -> None:
    assert PAGE.read_text() == page(read_results()), "run python -m benchmarks.page"
    assert {benchmark.name for benchmark in BENCHMARKS} <= slugs(PAGE)


@pytest.mark.parametrize("readme", READMES, ids=lambda readme: readme.name)
def test_the_figures_of_the_readme_are_those_that_were_kept(readme: Path) -> None:
    assert readme.read_text() == with_figures(readme.read_text(), read_results()), "run python -m benchmarks.page"


def test_figures_that_the_readme_quotes_change_with_the_results() -> None:
    items = [
        f"- Costs {' and '.join(['**1.5**'] * len(figures))}\n  ([all](docs/benchmarks.md#{name})).\n"
        for name, figures in QUOTED.items()
    ]
    changed = with_figures(
        "\n".join((*items, "- **7** is not quoted\n")),
        {"gateway": kept("gateway", dict.fromkeys(QUOTED["gateway"], 12.345))},
    )
    assert "- Costs **12.3** and **12.3** and **12.3**\n  ([all](docs/benchmarks.md#gateway))" in changed
    unknown = " and ".join(["**not measured yet**"] * len(QUOTED["exactness"]))
    assert f"- Costs {unknown}\n  ([all](docs/benchmarks.md#exactness))" in changed
    assert changed.endswith("- **7** is not quoted\n")


def kept(name: str, figures: dict[str, float], targets: dict[str, str] | None = None, *missed: str) -> Result:
    return Result(
        name=name,
        date="2026-11-17 10:00 UTC",
        commit="abc",
        machine={"cpu": "some", "cores": 2, "memory_gb": 8, "python": "3.12.1", "load": 0.3},
        command=f"python -m benchmarks.{name}",
        ok=not missed,
        missed=missed,
        figures=figures,
        targets=targets or {},
    )


def test_the_page_shows_figures_side_by_side_targets_that_were_missed_and_what_was_not_run() -> None:
    figures = {"shard_steps_s": 9_000.0, "bare_steps_s": 10_000.0, "shard_of_bare": 0.9, "fetch_of_bare": 0.42}
    targets = {"shard_of_bare": ">= 0.8", "fetch_of_bare": ">= 0.5"}
    written = page({"pool": kept("pool", figures, targets, "fetch_of_bare")})
    assert "| steps a second into a shard | 9,000 | 10,000 |" in written
    assert "| [pool](#pool) | `fetch_of_bare` | 0.42 | ≥ 0.5 |" in written
    assert "| `shard_of_bare` | 0.9 | ≥ 0.8 | met |" in written
    assert "| 1 of 2 | 2026-11-17 |" in written
    assert (
        "2026-11-17 10:00 UTC, commit abc, some, 2 cores, 8 GB, Python 3.12.1, load 0.3: `python -m benchmarks.pool`"
        in written
    )
    assert "*Not run yet*: `python -m benchmarks.truth`." in written


def test_a_run_goes_on_after_a_miss_and_a_failure_and_ends_with_all_targets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [made_up("good", "1.5"), made_up("bad", "2.5"), made_up("broken", "crash"), made_up("last", "2")]
    given = run_all(rows, tmp_path)
    assert conclude(given) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "2/4 bad: Nothing." in lines
    assert json.loads(lines[-1]) == {"ok": False, "missed": ["bad.figure"], "failed": ["broken"]}
    assert [line.split() for line in lines[-5:-1]] == [
        ["good", "figure", "1.5", "<=", "2.0", "met"],
        ["bad", "figure", "2.5", "<=", "2.0", "MISSED"],
        ["broken", "failed:", "it", "ended", "without", "figures"],
        ["last", "figure", "2", "<=", "2.0", "met"],
    ]
    found = read_results(tmp_path)
    assert (found["bad"].ok, found["bad"].missed, found["bad"].figures) == (
        False,
        ["figure"],
        {"figure": 2.5, "other": 3},
    )
    assert found["broken"].failure
    assert conclude([found["good"], found["last"]]) == 0


def test_a_benchmark_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    (result,) = run_all([made_up("slow", "hang", minutes=0.02)], tmp_path)
    assert result.failure == "it was ended after 0.02 minutes"
    assert not result.ok


def test_a_resumed_run_keeps_what_was_measured_lately_and_measures_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long_ago = replace(kept("old", {"figure": 1.0}), date="2026-01-01 10:00 UTC")
    lately = replace(kept("new", {"figure": 1.0}, {"figure": "<= 2.0"}), date=results.now())
    failed = replace(kept("failed", {}), date=results.now(), failure="it ended without figures")
    found = recent({"old": long_ago, "new": lately, "failed": failed})
    assert found == {"new": lately}
    given = run_all([made_up("new", "crash"), made_up("old", "1.5"), made_up("failed", "1.5")], tmp_path, found)
    assert [result.figures["figure"] for result in given] == [1.0, 1.5, 1.5]
    assert conclude(given) == 0
    assert "kept from " in capsys.readouterr().out


def test_benchmarks_that_take_hours_are_run_by_name_only() -> None:
    usual = [benchmark.name for benchmark in chosen([], ["learning"])]
    assert "survival" not in usual
    assert "learning" not in usual
    assert [benchmark.name for benchmark in chosen(["survival", "pool"], [])] == ["pool", "survival"]
    with pytest.raises(SystemExit, match="no benchmark is named puol"):
        chosen(["puol"], [])


@pytest.mark.parametrize("output", ["", "measuring\n", '{"ok": true}\n', "[1]\n", "7\n"])
def test_output_without_a_closing_line_has_no_figures(output: str) -> None:
    assert closing_line(output) is None


def test_a_number_is_written_as_people_read_it() -> None:
    assert [number(value) for value in (0, 3.0, 16_000, 0.99998, 1e9)] == [
        "0",
        "3",
        "16,000",
        "0.99998",
        "not measured",
    ]
    assert number(1.3456, digits=3) == "1.35"


def test_the_commit_is_that_of_the_checkout(tmp_path: Path) -> None:
    assert re.fullmatch(r"[0-9a-f]{12}( with changes)?", commit())
    assert commit(tmp_path) == "unknown"
