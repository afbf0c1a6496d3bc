import pytest

from stepwell.commands.forget import ForgetSettings
from stepwell.commands.pool import PoolSettings
from stepwell.commands.sections import read_settings
from stepwell.errors import BadRequest


@pytest.mark.parametrize(
    ("said", "seconds"), [("30d", 2_592_000.0), ("12h", 43_200.0), ("1.5m", 90.0), ("2w", 1_209_600.0), ("45", 45.0)]
)
def test_a_duration_is_a_number_with_a_unit_or_seconds(said: str, seconds: float) -> None:
    assert read_settings(ForgetSettings, ["--older-than", said], "forget").older_than == seconds
    assert read_settings(PoolSettings, ["--retention", said], "pool").limits().retention == seconds


@pytest.mark.parametrize("said", ["0", "-1d", "30 days", "d", "a month"])
def test_anything_else_is_refused(said: str) -> None:
    with pytest.raises(BadRequest):
        read_settings(ForgetSettings, [f"--older-than={said}"], "forget")


@pytest.mark.parametrize(
    "flags", [[], ["--subject", "ann", "--older-than", "30d"], ["--overdue", "--older-than", "30d"]]
)
def test_either_a_subject_or_an_age_is_said(flags: list[str]) -> None:
    with pytest.raises(BadRequest, match="either --subject or --older-than"):
        read_settings(ForgetSettings, flags, "forget")


def test_confirm_belongs_to_overdue() -> None:
    assert read_settings(ForgetSettings, ["--overdue", "--confirm"], "forget").confirm
    with pytest.raises(BadRequest, match="--confirm belongs to --overdue"):
        read_settings(ForgetSettings, ["--subject", "ann", "--confirm"], "forget")
