"""Runs each environment with atroposlib itself, under the same stand-ins, and writes which of them start.

    python -m tests.originals.atropos.baseline [PART_OF_A_FILE_NAME …]

The table is baseline.json: file → "starts", or why not. Started means: the setup and the first item are done, for an
evaluation the first evaluated item. A nightly test compares it.
"""

import asyncio
import json
import re
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from rig.tiny_model import make_tiny_model
from tests.originals.atropos.row import Row
from tests.originals.atropos.running import Forkserver, Outcome, forkserver, run
from tests.originals.atropos.table import DO_NOT_START, TABLE, row_of

BASELINE = Path(__file__).with_name("baseline.json")
STARTS = "starts"
AT_ONCE = 3
TIMEOUT_S = 180.0
PLACES = re.compile(r" ?\(?'?/(tmp|root|home|work)/[^ )']*'?\)?| at 0x[0-9a-f]+")
"""What differs from run to run."""
STARTED = {"collect_trajectories", "evaluate", "collect_trajectories failed", "evaluate failed"}


def main() -> None:
    rows = [row for row in all_rows() if not sys.argv[1:] or any(part in row.file for part in sys.argv[1:])]
    found = started_with_atroposlib(rows)
    if sys.argv[1:] and BASELINE.exists():  # read afterwards: others may have written their parts meanwhile
        found = json.loads(BASELINE.read_text()) | found
    BASELINE.write_text(json.dumps(dict(sorted(found.items())), indent=2) + "\n")


def all_rows() -> list[Row]:
    return [row for row in (*TABLE, *map(row_of, DO_NOT_START)) if not row.skip]


def started_with_atroposlib(rows: Iterable[Row]) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny = make_tiny_model(folder / "tiny")
        with forkserver(folder) as forks:
            return asyncio.run(_run_all(rows, folder, tiny, forks))


async def _run_all(rows: Iterable[Row], folder: Path, tiny: Path, forks: Forkserver) -> dict[str, str]:
    turn = asyncio.Semaphore(AT_ONCE)

    async def one(row: Row) -> tuple[str, str]:
        async with turn:
            outcome = await run(
                replace(row, timeout=TIMEOUT_S),
                folder / row.file.replace("/", "_"),
                tiny,
                forks,
                whose="atroposlib",
                until=STARTED,
            )
            sys.stderr.write(f"{row.file}: {verdict(outcome)}\n")
            return row.file, verdict(outcome)

    return dict(await asyncio.gather(*map(one, rows)))


def verdict(outcome: Outcome) -> str:
    """Its own words where it failed: the last line of the first failure."""
    if outcome.has_started:
        return STARTS
    failures = [text for stage, text in outcome.stages.items() if stage.endswith("failed")]
    said_so = (failures[0] if failures else outcome.log).strip().splitlines()
    lines = [line for line in said_so if "errors.pydantic.dev" not in line]
    said = PLACES.sub("", lines[-1].strip()[:160]) if lines else "it says nothing"
    return said if failures or "ended" in outcome.stages else f"it does not end its first item ({said})"


if __name__ == "__main__":
    main()
