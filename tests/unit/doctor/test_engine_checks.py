import pytest

from stepwell.doctor.engine_checks import capability_checks
from stepwell.doctor.findings import Grade
from stepwell.engines import ENGINES
from stepwell.engines.connections import EngineConnections
from stepwell.engines.engine import EngineHttp
from stepwell.engines.replica import EngineReplica


@pytest.mark.parametrize(
    ("before", "after", "grade"),
    [("3", "3", Grade.OK), ("3", "4", Grade.FAULT), (None, "3", Grade.OK), (None, None, Grade.WARNING)],
)
async def test_only_a_version_that_was_known_before_can_have_changed(
    before: str | None, after: str | None, grade: Grade
) -> None:
    engine = EngineReplica(EngineHttp(EngineConnections(), "http://127.0.0.1:9"), ENGINES, on_change=lambda: None)
    engine.kind = ENGINES[0]
    engine.weight_version = after
    (check,) = (check for check in capability_checks(engine, before) if check.name == "weight version")
    assert check.finding.grade is grade
