"""baseline.json says which of Atropos' environments start with atroposlib itself, under the same stand-ins."""

import json

import pytest

from tests.originals.atropos.baseline import BASELINE, STARTS, all_rows, started_with_atroposlib
from tests.originals.atropos.table import DO_NOT_START, TABLE

KNOWN: dict[str, str] = json.loads(BASELINE.read_text())


def test_the_baseline_has_every_environment() -> None:
    assert KNOWN.keys() == {row.file for row in all_rows()}


def test_what_starts_with_atroposlib_is_tested_with_ours() -> None:
    starts = {file for file, verdict in KNOWN.items() if verdict == STARTS}
    assert starts <= {row.file for row in TABLE if not row.skip}
    assert not starts & DO_NOT_START.keys()


@pytest.mark.nightly
def test_the_same_environments_start_with_atroposlib_as_the_baseline_says() -> None:
    now = started_with_atroposlib(all_rows())
    assert {file for file, verdict in now.items() if verdict == STARTS} == {
        file for file, verdict in KNOWN.items() if verdict == STARTS
    }
