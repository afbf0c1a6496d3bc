"""Which versions the pool takes, by what gateways report of their engines."""

from collections.abc import Mapping

import pytest

from stepwell.pool.shard.gateway_roster import ANNOUNCED_FOR, EngineReports

ONE, OTHER = "http://one", "http://other"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def reports(versions: Mapping[str, int | None], clock: Clock | None = None) -> EngineReports:
    found = EngineReports(clock or Clock())
    found.note("gateway", versions)
    return found


def refuses(found: EngineReports, version: int) -> bool:
    return found.why_unreported(version, ["gateway"]) is not None


def test_a_version_that_no_engine_reports_is_refused_with_what_to_do() -> None:
    why = reports({OTHER: 3, ONE: 0}).why_unreported(4, ["gateway"])
    assert why is not None
    assert why.startswith(
        "no engine reports version 4: http://one has the weights that it was started with; http://other has version 3. "
    )
    assert "WeightSync" in why
    assert why.endswith("set_policy_version(4, check=False) sets it all the same")


def test_a_version_that_one_engine_reports_is_taken() -> None:
    found = reports({ONE: 0, OTHER: 3})
    assert [refuses(found, version) for version in (0, 1, 2, 3, 4)] == [False, True, True, False, True]


@pytest.mark.parametrize("versions", [{}, {ONE: None}, {ONE: 0, OTHER: None}])
def test_any_version_is_taken_where_nobody_knows(versions: Mapping[str, int | None]) -> None:
    assert not refuses(reports(versions), 4)


def test_a_gateway_that_is_gone_no_longer_counts() -> None:
    found = reports({ONE: 0})
    found.note("second", {ONE: 0, OTHER: 4})
    assert not refuses(reports({ONE: 0}), 0)
    assert found.why_unreported(4, ["gateway", "second"]) is None
    assert found.why_unreported(4, ["gateway"]) is not None
    assert found.why_unreported(4, []) is None


def test_a_trainer_that_is_heard_is_about_to_sync_any_version() -> None:
    clock = Clock()
    found = reports({ONE: 0}, clock)
    assert not found.is_sync_expected
    found.announce_sync()
    assert found.is_sync_expected
    assert not refuses(found, 4)
    clock.now += ANNOUNCED_FOR
    assert not found.is_sync_expected
    assert refuses(found, 4)
