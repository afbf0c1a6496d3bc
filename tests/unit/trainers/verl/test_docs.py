"""docs/bring-your-own-trainer.md: what it says of verl is what there is."""

import re
from dataclasses import fields
from pathlib import Path

from rig.trainers.verl_run import EXAMPLE
from stepwell.trainers.verl.mode_settings import PoolModeSettings

PAGE = (Path(__file__).parents[4] / "docs" / "bring-your-own-trainer.md").read_text()
SECTION = PAGE.partition("## verl\n")[2].partition("\n## ")[0]
COMMAND = "python -m verl.trainer.main_ppo 'hydra.searchpath=[pkg://stepwell.trainers.verl]' +config=stepwell"
SETTINGS = {of.name for of in fields(PoolModeSettings)}


def test_the_command_is_the_one_that_is_tested() -> None:
    assert COMMAND in EXAMPLE.read_text()
    assert COMMAND in SECTION


def test_the_table_has_every_setting_and_no_other() -> None:
    rows = re.findall(r"^\| (`.*?) \|", SECTION, re.M)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == SETTINGS


def test_settings_in_commands_exist() -> None:
    assert set(re.findall(r"trainer\.v1\.stepwell\.(\w+)", SECTION + EXAMPLE.read_text())) <= SETTINGS
