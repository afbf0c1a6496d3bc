"""The number of rollouts in a group has Claw-R1's name too, wherever a setting has it."""

import pytest

from stepwell.commands.launch_plan import UpSettings
from stepwell.commands.pool import PoolSettings
from stepwell.commands.sections import read_settings
from stepwell.errors import BadRequest

NEEDED = {PoolSettings: [], UpSettings: ["--engine", "http://e:1"]}


@pytest.mark.parametrize("flag", ["--n-rollouts", "--group-size"])
@pytest.mark.parametrize("settings", [PoolSettings, UpSettings])
def test_both_flags_say_it(settings: type[PoolSettings] | type[UpSettings], flag: str) -> None:
    assert read_settings(settings, [*NEEDED[settings], flag, "5"], "stepwell").group_size == 5


@pytest.mark.parametrize("variable", ["STEPWELL_POOL_GROUP_SIZE", "STEPWELL_POOL_N_ROLLOUTS"])
@pytest.mark.parametrize("flag", ["--n-rollouts", "--group-size"])
def test_a_flag_has_precedence_over_the_environment_under_either_name(
    monkeypatch: pytest.MonkeyPatch, variable: str, flag: str
) -> None:
    monkeypatch.setenv(variable, "3")
    assert read_settings(PoolSettings, [], "stepwell").group_size == 3
    assert read_settings(PoolSettings, [flag, "5"], "stepwell").group_size == 5


def test_a_wrong_number_is_told() -> None:
    with pytest.raises(BadRequest, match="--group-size"):
        read_settings(PoolSettings, ["--n-rollouts", "0"], "stepwell")
