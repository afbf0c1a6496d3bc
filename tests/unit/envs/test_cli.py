"""An environment's command line, from its words to its files. Nothing is sampled: the rollouts are made up."""

import sys
from pathlib import Path

import pytest

from rig.group_files import read_lines, read_table
from stepwell.envs import APIServerConfig, BaseEnv, BaseEnvConfig, Item, ScoredDataItem
from stepwell.envs.base import main


class CountingConfig(BaseEnvConfig):
    first: int = 1
    """The first number."""


class Counting(BaseEnv):
    """Counts, and calls it work.

    More that --help of the program need not say.
    """

    env_config_cls = CountingConfig
    config: CountingConfig

    @classmethod
    def config_init(cls) -> tuple[CountingConfig, APIServerConfig]:
        return CountingConfig(group_size=2), APIServerConfig()

    async def setup(self) -> None:
        self.number = self.config.first - 1
        self.rollouts = 0

    async def get_next_item(self) -> Item:
        self.number += 1
        return self.number

    async def collect_trajectory(self, item: Item) -> tuple[ScoredDataItem | None, list[Item]]:
        self.rollouts += 1
        return {"tokens": [item, 7], "masks": [-100, 7], "scores": float(self.rollouts)}, []

    async def evaluate(self) -> dict[str, float]:
        return {"eval/first": self.config.first, "eval/third": 1 / 3}


@pytest.fixture(autouse=True)
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Called as counting.py, in a folder of its own."""
    monkeypatch.setattr(sys, "argv", ["somewhere/counting.py"])
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_help_lists_the_commands(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main(Counting, argv)
    shown = capsys.readouterr().out
    assert shown.startswith("usage: counting.py COMMAND [FLAGS]\n\nCounts, and calls it work.\n\n  serve ")
    assert all(f"\n  {command} " in shown for command in ("serve", "process", "evaluate"))


@pytest.mark.parametrize("command", ["serve", "process", "evaluate"])
def test_every_command_explains_its_flags(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(Counting, [command, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: counting.py {command} [FLAGS]\n")
    assert "--env.first int" in shown
    assert ("--groups" in shown) == (command == "process")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["sreve"], "counting.py: unknown command 'sreve'; there are: serve, process, evaluate\n"),
        (["serve", "--env.first", "x"], "counting.py serve: env.first must be a whole number"),
        (["serve", "--groups", "3"], "counting.py serve: unrecognized arguments: --groups 3"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(Counting, argv)
    shown = capsys.readouterr().err
    assert ended.value.code == 2
    assert shown.startswith(said)
    assert shown.count("\n") == 1


def test_process_writes_groups_in_three_forms(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(Counting, ["process", "--groups", "3", "--group-size", "4", "--out", "there", "--env.first", "5"])
    groups = list(read_lines(program / "there" / "groups.jsonl"))
    assert sorted(group["tokens"] for group in groups) == [[[n, 7]] * 4 for n in (5, 6, 7)]
    assert list(read_table(program / "there" / "groups.parquet")) == groups
    assert (program / "there" / "groups.html").read_text().count("<article") == 3
    assert "3 groups in there; to read: there/groups.html\n" in capsys.readouterr().out


def test_process_fails_where_nothing_was_made(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(Counting, ["process", "--groups", "1", "--env.max-token-length", "1", "--group-size", "1"])
    assert ended.value.code == 1
    shown = capsys.readouterr().err
    assert "dropped 10 (equal scores)" in shown
    assert shown.endswith("counting.py process: no group was made; the messages above say why\n")
    assert list(program.iterdir()) == []


def test_process_writes_over_nothing(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(Counting, ["process", "--groups", "1"])
    with pytest.raises(SystemExit) as ended:
        main(Counting, ["process", "--groups", "1"])
    assert ended.value.code == 1
    assert "counting.py process: groups already has a groups.jsonl: name another folder" in capsys.readouterr().err


def test_evaluate_prints_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    main(Counting, ["evaluate", "--env.first", "4"])
    assert capsys.readouterr().out == "eval/first 4\neval/third 0.333333\n"
