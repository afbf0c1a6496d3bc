"""docs/start.md: tests/e2e/test_new_user.py runs its commands; this checks the rest."""

import re
from pathlib import Path

import pytest

from stepwell.commands.launch_plan import ServedModel, UpSettings, make_plan
from stepwell.commands.sections import read_settings
from stepwell.commands.state_folder import StateFolder

CHECKOUT = Path(__file__).parents[3]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (CHECKOUT / page).read_text(), re.S)


def test_its_programs_are_those_of_the_readme() -> None:
    assert blocks("docs/start.md", "python") == blocks("README.md", "python")


def test_its_file_is_read_as_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = blocks("docs/start.md", "toml")
    (tmp_path / "stepwell.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    settings = read_settings(UpSettings, [], "stepwell up")
    plan = make_plan(settings, ServedModel(name="m", root="m", window=8), StateFolder(tmp_path), "k" * 32)
    assert (plan.pool.group_size, plan.pool.max_staleness) == (8, 4)
    assert (plan.pool.shards, plan.pool.group_deadline, plan.gateway.routing) == (2, 1800.0, "least_busy")
