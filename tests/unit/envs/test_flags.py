"""Defaults < YAML < flags, and a line for each thing that is wrong."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepwell.common.command_line import FlagParser
from stepwell.envs.config import (
    APIServerConfig,
    BaseEnvConfig,
    EnvFlags,
    EnvSettings,
    EvalHandling,
    ProcessFlags,
    read_flags,
    unknown_settings,
)
from stepwell.errors import BadRequest


class SumConfig(BaseEnvConfig):
    digits: int = 2
    """Digits of the numbers."""
    topics: tuple[str, ...] = ()
    """Topics to ask about."""


DEFAULTS = EnvSettings(
    SumConfig(group_size=8, rollout_server_key="secret-1"),
    [APIServerConfig(model_name="a", api_key="secret-2"), APIServerConfig(model_name="b", api_key="secret-2")],
    EnvFlags(),
)


def read(*argv: str, flags: type[EnvFlags] = EnvFlags, defaults: EnvSettings = DEFAULTS) -> EnvSettings:
    defaults = replace(defaults, flags=flags.model_construct())
    return read_flags(defaults, argv, FlagParser("my_env.py serve", "About it."))


def env_of(*argv: str, **more: Any) -> SumConfig:
    env = read(*argv, **more).env
    assert isinstance(env, SumConfig)
    return env


def yaml(folder: Path, text: str) -> str:
    (folder / "my.yaml").write_text(text)
    return f"--config={folder / 'my.yaml'}"


def test_without_flags_there_are_the_defaults() -> None:
    told = read()
    assert told.env == DEFAULTS.env
    assert list(told.servers) == DEFAULTS.servers


def test_flags_go_before_the_file_and_the_file_before_the_defaults(tmp_path: Path) -> None:
    file = yaml(
        tmp_path, "env:\n  group_size: 2\n  digits: 5\n  topics: [x, y]\nopenai:\n  model_name: c\n  timeout: 9\n"
    )
    told = read(file, "--env.digits", "7", "--openai.timeout=3")
    assert told.env == SumConfig(group_size=2, digits=7, topics=("x", "y"), rollout_server_key="secret-1")
    expected = APIServerConfig(model_name="c", timeout=3, api_key="secret-2")
    assert told.servers == (expected, expected)


def test_a_list_of_servers_takes_the_place_of_the_defaults_and_flags_are_for_all(tmp_path: Path) -> None:
    file = yaml(tmp_path, "openai:\n- model_name: c\n- model_name: d\n  timeout: 9\n")
    told = read(file, "--openai.api-key", "k")
    assert told.servers == (
        APIServerConfig(model_name="c", api_key="k"),
        APIServerConfig(model_name="d", api_key="k", timeout=9),
    )


def test_underscores_and_dashes_name_the_same_flag_and_values_keep_theirs() -> None:
    assert env_of("--env.group_size", "3").group_size == env_of("--env.group-size=3").group_size == 3
    assert env_of("--env.wandb_name=my_run").wandb_name == "my_run"
    assert env_of("--env.wandb-name", "my_run").wandb_name == "my_run"


def test_every_sort_of_value_can_be_given() -> None:
    env = env_of("--env.use-wandb", "true", "--env.eval-handling", "NONE", "--env.max-num-workers", "-1")
    assert (env.use_wandb, env.eval_handling, env.max_num_workers) == (True, EvalHandling.NONE, -1)
    assert env_of("--env.topics", "x", "--env.topics", "y").topics == ("x", "y")


def test_process_has_flags_of_its_own() -> None:
    told = read("--groups", "3", "--out", "here", "--group-size", "5", flags=ProcessFlags)
    assert told.flags == ProcessFlags(groups=3, out="here", group_size=5)
    assert told.env.group_size == 5


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--env.grup-size", "3"], "unrecognized arguments: --env.grup-size 3; did you mean --env.group-size?"),
        (["--group-size", "3"], "unrecognized arguments: --group-size 3; did you mean --env.group-size?"),
        (["--env.group-size", "0"], "env.group_size must be at least 1"),
        (["--env.digits", "x"], "env.digits must be a whole number"),
        (["--env.digits"], "argument --env.digits: expected one argument"),
        (["--env.rollout-server-url", "here"], "env.rollout_server_url: 'here' is no address; write http://host:port"),
        (["more"], "unrecognized arguments: more"),
        (["--openai.timeout", "0"], "openai.timeout must be greater than 0"),
    ],
)
def test_a_wrong_flag_is_answered_in_one_line(argv: list[str], words: str) -> None:
    with pytest.raises(BadRequest) as refused:
        read(*argv)
    assert str(refused.value) == words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- 1\n", "my.yaml is no mapping; write settings below `env:` and `openai:`"),
        ("env: [\n", "my.yaml is no YAML: while parsing"),
        ("env: 3\n", "3 is no mapping; write `group_size: 8` below `env:`"),
        ("openai: [3]\n", "3 is no mapping"),
        ("env:\n  digits: x\n", "env.digits must be a whole number"),
    ],
)
def test_a_wrong_file_is_answered_in_one_line(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(BadRequest) as refused:
        read(yaml(tmp_path, text))
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_atropos_ignores_in_a_file_changes_nothing_and_is_named(tmp_path: Path) -> None:
    file = yaml(tmp_path, "env:\n  grup_size: 3\nopenai:\n- weight: 1.0\n  timeout: 9\ntinker:\n  lora_rank: 32\n")
    told = read(file)
    assert (told.env.group_size, told.servers[0].timeout) == (8, 9)
    assert unknown_settings(told.env, "env.") == [
        "env.grup_size: there is no such setting; it changes nothing; did you mean env.group_size?"
    ]
    assert unknown_settings(told.servers[0], "openai.") == [
        "openai.weight: there is no such setting; it changes nothing"
    ]
    assert told.notes == ["--config: 'tinker' changes nothing: settings stand below `env:` and `openai:`"]


def test_a_file_sets_slurm_and_testing_as_flags_do(tmp_path: Path) -> None:
    told = read(yaml(tmp_path, "slurm: true\ntesting: true\n"), "--slurm", "false")
    assert (told.flags.slurm, told.flags.testing, told.notes) == (False, True, [])


def test_flags_of_atropos_that_change_nothing_are_accepted_with_a_note() -> None:
    told = read("--max_n_completions", "4", "--proxy_url", "http://localhost:9100", "--slurm", "false")
    assert list(told.notes) == ["--max-n-completions changes nothing here", "--proxy-url changes nothing here"]


def test_a_port_is_accepted_and_the_note_says_what_to_write_instead() -> None:
    told = read("--port", "8001")
    assert told.env == DEFAULTS.env
    assert told.notes == [
        "--port 8001 changes nothing: an environment listens on no port."
        " --env.rollout-server-url is the address of the rollout server"
    ]


def test_a_missing_file_is_named() -> None:
    with pytest.raises(BadRequest, match="--config: no/such.yaml cannot be read: No such file or directory"):
        read("--config", "no/such.yaml")


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    assert read(yaml(tmp_path, "")).env == DEFAULTS.env
    assert read(yaml(tmp_path, "env:\nopenai:\n")).servers == tuple(DEFAULTS.servers)


def test_help_has_every_field_with_its_docstring_and_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        read("--help")
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.startswith("usage: my_env.py serve [FLAGS] About it.")
    assert "--env.digits int Digits of the numbers. (default: 2)" in shown
    assert "--env.group-size int Rollouts of one item; they are trained together. (default: 8)" in shown
    for kind, prefix in ((SumConfig, "env"), (APIServerConfig, "openai")):
        for name, field in kind.model_fields.items():
            assert f"--{prefix}.{name.replace('_', '-')} " in shown
            assert field.description


def test_help_shows_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read("--help")
    assert "secret" not in capsys.readouterr().out
