"""docs/bring-your-own-trainer.md: what it says of verl is what there is."""

import re
from dataclasses import fields
from pathlib import Path

from stepwell.trainers.verl.mode_settings import PoolModeSettings
from tests.rig.trainers.verl_run import SEARCH

PAGE = (Path(__file__).parents[4] / "docs" / "bring-your-own-trainer.md").read_text()
SECTION = PAGE.partition("## verl\n")[2].partition("\n## ")[0]
SETTINGS = {of.name for of in fields(PoolModeSettings)}


def test_the_command_is_the_one_that_is_tested() -> None:
    searched = SEARCH.replace("hydra.searchpath=[", "").partition(",")[0]
    assert f"'hydra.searchpath=[{searched}]' +config=stepwell" in SECTION


def test_the_table_has_every_setting_and_no_other() -> None:
    rows = re.findall(r"^\| (`.*?) \|", SECTION, re.M)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == SETTINGS


def test_settings_in_commands_exist() -> None:
    assert set(re.findall(r"trainer\.v1\.stepwell\.(\w+)", SECTION)) <= SETTINGS
