"""The page for users of Claw-R1 names every key of its configuration, and nothing of ours that does not exist."""

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from stepwell.agents.claw_r1 import ClawR1Flow
from stepwell.agents.dataset import Dataset
from stepwell.agents.rollouter import AsyncRollouter
from stepwell.agents.validation import Validation
from stepwell.commands.gateway import GatewaySettings
from stepwell.commands.pool import PoolSettings
from stepwell.commands.sections import flags_of
from stepwell.trainers.settings import Settings
from tests.originals.claw.original import claw_r1

PAGE = Path(__file__).parents[3] / "docs" / "coming-from-claw-r1.md"
YAML = (
    *("config/agent_ppo_trainer.yaml", "config/async_ppo_trainer.yaml", "config/overrides/rollout.yaml"),
    "blackbox_agent/agent_flow_config.yaml",
)
PYTHON = {"config/config.py": None, "data_pool/data_model.py": "DataPoolConfig"}
"""Files with dataclasses of settings, and the one of interest if there are others."""


def table() -> list[tuple[str, str]]:
    section = PAGE.read_text().partition("## Its configuration\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [(key.strip(), here.strip()) for _, key, here, _ in (line.split("|") for line in lines)]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def keys_of_yaml(tree: Any, prefix: str = "") -> Iterator[str]:
    for one in tree if isinstance(tree, list) else [tree]:
        for name, value in one.items():
            if isinstance(value, Mapping):
                yield from keys_of_yaml(value, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}"


def keys_of_python(source: str, only: str | None) -> Iterator[str]:
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and only in (None, node.name):
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    yield f"{node.name}.{line.target.id}"


@pytest.mark.parametrize("file", YAML)
def test_every_key_of_its_files_is_in_the_table(file: str) -> None:
    keys = set(keys_of_yaml(yaml.safe_load((claw_r1() / "claw_r1" / file).read_text())))
    assert keys
    assert keys - {name for key, _ in table() for name in names(key)} == set()


@pytest.mark.parametrize("file", PYTHON)
def test_every_field_of_its_settings_is_in_the_table(file: str) -> None:
    keys = set(keys_of_python((claw_r1() / "claw_r1" / file).read_text(), PYTHON[file]))
    assert keys
    assert keys - {name for key, _ in table() for name in names(key)} == set()


def test_every_flag_and_setting_of_ours_that_the_table_names_exists() -> None:
    parsers = [flags_of(settings, "stepwell").root_parser for settings in (PoolSettings, GatewaySettings)]
    flags = {flag for parser in parsers for action in parser._actions for flag in action.option_strings}
    ours = {f"Settings.{field.name}" for field in fields(Settings)} | {"Validation.every"}
    assert "every" in inspect.signature(Validation).parameters
    for made in (Dataset, AsyncRollouter, ClawR1Flow):
        ours |= {f"{made.__name__}.{name}" for name in inspect.signature(made).parameters}
    named = [name for _, here in table() for name in names(here)]
    assert len(named) > 15
    for name in named:
        if name.startswith("--"):
            assert name in flags, name
        elif re.fullmatch(r"[A-Z]\w+\.\w+", name):
            assert name in ours, name


def test_each_row_says_what_stands_in_the_place_of_a_key_or_why_nothing_does() -> None:
    rows = table()
    assert len(rows) > 20
    for key, here in rows:
        assert names(key), key
        assert here.startswith(("none: ", "as the keys")) or names(here), (key, here)
