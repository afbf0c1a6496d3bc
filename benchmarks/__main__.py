"""Runs every benchmark of benchmarks/table.py, one after the other, and keeps what each gave in benchmarks/results/.

A benchmark that fails, misses a target or takes too long does not stop the others. At the end there is one table of all
targets, and the last line is one JSON object. The exit status is 1 if anything was missed or failed.

    python -m benchmarks                    # all but those that take hours
    python -m benchmarks gateway pool       # these
    python -m benchmarks --but learning     # all others
    python -m benchmarks --resume           # go on after an interruption: what was measured within a day is kept
    python -m benchmarks.page               # docs/benchmarks.md from the results
"""

import argparse
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import IO

from benchmarks import results
from benchmarks.results import CHECKOUT, FOLDER, Result
from benchmarks.table import BENCHMARKS, Benchmark

CLEANING_UP = 60.0
"""Seconds in which an interrupted benchmark ends what it has started."""

RESUMED = timedelta(days=1)
"""A run that is resumed keeps results that are not older."""


def run_benchmark(benchmark: Benchmark) -> Result:
    """In a process of its own, whose output is passed on, and which is ended when its time is over."""
    date, commit, machine = results.now(), results.commit(), results.machine()
    output, failure = _run([sys.executable, *benchmark.command], benchmark.minutes)
    told = results.closing_line(output)
    if told is None:
        told, failure = {"ok": False, "missed": [], "figures": {}, "targets": {}}, failure or "it ended without figures"
    else:
        failure = ""
    return Result(
        name=benchmark.name,
        date=date,
        commit=commit,
        machine=machine,
        command=" ".join(("python", *benchmark.command)),
        failure=failure,
        **{key: told[key] for key in ("ok", "missed", "figures", "targets")},
    )


def _run(command: Sequence[str], minutes: float) -> tuple[str, str]:
    """What it printed, and why it was ended."""
    process = subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    lines: list[str] = []
    reading = threading.Thread(target=_pass_on, args=(process.stdout, lines), daemon=True)
    reading.start()
    failure = ""
    try:
        process.wait(60 * minutes)
    except subprocess.TimeoutExpired:
        failure = f"it was ended after {minutes:g} minutes"
        _end(process)
    except BaseException:
        _end(process)
        raise
    reading.join(5.0)  # what it has left behind may keep the pipe open
    return "".join(lines), failure


def _pass_on(output: IO[str], lines: list[str]) -> None:
    with output:
        for line in output:
            lines.append(line)
            print(line, end="", flush=True)


def _end(process: "subprocess.Popen[str]") -> None:
    """An interrupt lets it end its own processes."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(CLEANING_UP)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def run_all(
    benchmarks: Sequence[Benchmark], folder: Path, kept: Mapping[str, Result] = MappingProxyType({})
) -> list[Result]:
    """One result each: that in `kept`, or else of a run, which writes it into the folder."""
    given = []
    for number, benchmark in enumerate(benchmarks, 1):
        print(f"\n{number}/{len(benchmarks)} {benchmark.name}: {benchmark.measures}", flush=True)
        if benchmark.name in kept:
            result = kept[benchmark.name]
            print(f"kept from {result.date}, commit {result.commit}")
        else:
            result = run_benchmark(benchmark)
            result.write(folder)
        print(f"{benchmark.name}: {verdict(result)}", flush=True)
        given.append(result)
    return given


def recent(found: Mapping[str, Result]) -> dict[str, Result]:
    """Those of the last day that have figures."""
    return {name: result for name, result in found.items() if not result.failure and results.age(result) < RESUMED}


def verdict(result: Result) -> str:
    if result.failure:
        return f"failed: {result.failure}"
    return f"missed {', '.join(result.missed)}" if result.missed else "met"


def table(given: Sequence[Result]) -> list[str]:
    """Every target of every benchmark, met or missed."""
    rows = [("benchmark", "figure", "value", "target", "")]
    for result in given:
        if result.failure:
            rows.append((result.name, "", "", "", f"failed: {result.failure}"))
        for figure, is_met in result.targets_met().items():
            value, target = f"{result.figures[figure]:.6g}", result.targets[figure]
            rows.append((result.name, figure, value, target, "met" if is_met else "MISSED"))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return ["  ".join((*map(str.ljust, row, widths), row[4])).rstrip() for row in rows]


def chosen(names: Sequence[str], but: Sequence[str]) -> list[Benchmark]:
    """In the order of the table. SystemExit if there is no such benchmark."""
    known = {benchmark.name: benchmark for benchmark in BENCHMARKS}
    if unknown := [name for name in (*names, *but) if name not in known]:
        raise SystemExit(f"no benchmark is named {', '.join(unknown)}; there are: {', '.join(known)}")
    usual = [benchmark.name for benchmark in BENCHMARKS if not benchmark.is_by_name_only]
    return [known[name] for name in known if name in (names or usual) and name not in but]


def conclude(given: Sequence[Result]) -> int:
    """Prints the table and the closing line. The exit status."""
    missed = [f"{result.name}.{figure}" for result in given for figure in result.missed]
    failed = [result.name for result in given if result.failure]
    print("", *table(given), sep="\n")
    print(json.dumps({"ok": not (missed or failed), "missed": missed, "failed": failed}), flush=True)
    return 1 if missed or failed else 0


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a benchmark")
    parser.add_argument("--but", nargs="+", default=[], metavar="NAME", help="leave these out")
    parser.add_argument("--resume", action="store_true", help="keep what was measured within the last day")
    asked = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, and so inherited, by what a script runs with &
    kept = recent(results.read_results()) if asked.resume else {}
    sys.exit(conclude(run_all(chosen(asked.names, asked.but), FOLDER, kept)))


if __name__ == "__main__":
    main()
