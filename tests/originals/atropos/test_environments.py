"""Every environment that works with atroposlib makes groups with `python -m stepwell.envs`."""

import asyncio
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest

from rig.atropos import atropos_python
from tests.originals.atropos.counts import MADE_A_GROUP, PROPERTY, STARTED
from tests.originals.atropos.row import Row
from tests.originals.atropos.running import Forkserver, Outcome, forkserver, run, start_literally
from tests.originals.atropos.table import BY_FILE, DO_NOT_START, TABLE

AT_ONCE = 3
"""Environments that run at the same time: most of the time they wait for one another's processes, not for a core."""
PATIENCE_S = 900.0
"""For all that run before one. Each has its own, much shorter timeout."""
LITERALLY = (
    "gsm8k_server.py",
    "eval_environments/gsm8k_eval.py",
    "game_environments/gymnasium/gym_taxi.py",
)
LITERAL_TIMEOUT_S = 240.0
"""They import all packages themselves."""
ENVIRONMENT = re.compile(r"^class \w+\([\w, ]*\b(BaseEnv|EvalBase)\b", re.MULTILINE)


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forkserver]:
    with forkserver(tmp_path_factory.mktemp("forkserver")) as started:
        yield started


@pytest.fixture(scope="module")
def outcomes(
    forks: Forkserver, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> Iterator[dict[str, Future[Outcome]]]:
    """Of each environment that this session tests, as soon as it has run. A few run at a time, in the tests' order."""
    asked = [getattr(item, "callspec", None) for item in request.session.items]
    given = [call.params.get("row") for call in asked if call is not None]
    rows = [row for row in given if isinstance(row, Row) and row.file in BY_FILE and not row.skip]
    futures = {row.file: Future[Outcome]() for row in rows}

    async def run_one(row: Row, turn: asyncio.Semaphore) -> None:
        async with turn:
            try:
                outcome = await run(row, tmp_path_factory.mktemp("run"), tiny_model, forks)
                futures[row.file].set_result(outcome)
            except Exception as failure:  # noqa: BLE001 - the test of this row raises it
                futures[row.file].set_exception(failure)

    async def run_all() -> None:
        turn = asyncio.Semaphore(AT_ONCE)
        await asyncio.gather(*(run_one(row, turn) for row in rows))

    thread = Thread(target=asyncio.run, args=(run_all(),))
    thread.start()
    yield futures
    thread.join()


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.file)
def test_the_environment_starts_and_its_first_group_reaches_the_trainer(
    row: Row, outcomes: dict[str, Future[Outcome]], record_property: Callable[[str, object], None]
) -> None:
    if row.skip:
        pytest.skip(row.skip)
    outcome = outcomes[row.file].result(PATIENCE_S)
    assert outcome.has_started, str(outcome)
    record_property(PROPERTY, STARTED)
    if row.makes_group:
        _check_group(outcome)
        record_property(PROPERTY, MADE_A_GROUP)


@pytest.mark.parametrize("file", LITERALLY)
async def test_the_printed_command_starts_the_environment(
    file: str, tmp_path: Path, tiny_model: Path, forks: Forkserver
) -> None:
    row = replace(BY_FILE[file], timeout=LITERAL_TIMEOUT_S)
    outcome = await run(row, tmp_path, tiny_model, forks, start=start_literally)
    assert outcome.has_started, str(outcome)
    if row.makes_group:
        _check_group(outcome)


def test_every_environment_of_the_distribution_has_a_row_or_a_reason() -> None:
    root = atropos_python().parents[1] / "environments"
    files = {str(path.relative_to(root)) for path in root.rglob("*.py") if ENVIRONMENT.search(path.read_text("utf-8"))}
    named = BY_FILE.keys() | DO_NOT_START.keys()
    assert not files - named, "write a row for them in table/, or say in DO_NOT_START why they do not work"
    assert not named - {str(path.relative_to(root)) for path in root.rglob("*.py")}
    assert not BY_FILE.keys() & DO_NOT_START.keys()


def _check_group(outcome: Outcome) -> None:
    group = outcome.group
    assert group is not None, str(outcome)
    assert len(group["tokens"]) == len(group["masks"]) == len(group["scores"])
    for tokens, masks in zip(group["tokens"], group["masks"], strict=True):
        assert len(tokens) == len(masks)
        assert set(masks) - {-100}, "nothing of it is trained"
