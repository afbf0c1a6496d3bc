"""Every environment that works with atroposlib makes groups with `python -m stepwell.envs`."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.originals.atropos.row import Row
from tests.originals.atropos.running import Forkserver, Outcome, forkserver, run
from tests.originals.atropos.table import TABLE


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forkserver]:
    with forkserver(tmp_path_factory.mktemp("forkserver")) as started:
        yield started


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.file)
async def test_the_environment_starts_and_its_first_group_reaches_the_trainer(
    row: Row, tmp_path: Path, tiny_model: Path, forks: Forkserver, record_property: Callable[[str, object], None]
) -> None:
    if row.skip:
        pytest.skip(row.skip)
    outcome = await run(row, tmp_path, tiny_model, forks)
    assert outcome.has_started, str(outcome)
    record_property("atropos", "started")
    if row.command == "serve" and not row.only_starts:
        _check_group(row, outcome)
        record_property("atropos", "made a group")


def _check_group(row: Row, outcome: Outcome) -> None:
    group = outcome.group
    assert group is not None, str(outcome)
    assert len(group["tokens"]) == len(group["masks"]) == len(group["scores"])
    for tokens, masks in zip(group["tokens"], group["masks"], strict=True):
        assert len(tokens) == len(masks)
        assert {mask for mask in masks} - {-100}, "nothing of it is trained"
