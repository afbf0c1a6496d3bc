"""Where the settings of `stepwell up` come from, and the errors for wrong ones."""

from pathlib import Path

import pytest

from stepwell.commands.launch_plan import UpSettings, layered
from stepwell.commands.pool import PoolSettings
from stepwell.commands.sections import read_settings
from stepwell.commands.status import StatusSettings
from stepwell.errors import BadRequest

ENGINE = ["--engine", "http://127.0.0.1:8001"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(*flags: str) -> UpSettings:
    return read_settings(UpSettings, flags, "stepwell up")


def test_flags_override_the_environment_which_overrides_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "stepwell.toml").write_text('engine = "http://file:1"\nport = 1\nprompt_length = 1\ngroup_size = 1\n')
    assert read().engine == ("http://file:1",)
    monkeypatch.setenv("STEPWELL_UP_PORT", "2")
    monkeypatch.setenv("STEPWELL_UP_PROMPT_LENGTH", "2")
    settings = read("--port", "3")
    assert (settings.port, settings.prompt_length, settings.group_size) == (3, 2, 1)


def test_engines_may_be_a_list_in_the_file_and_end_with_v1(folder: Path) -> None:
    (folder / "stepwell.toml").write_text('engine = ["http://a:1/", "http://b:2/v1"]\n')
    assert read().engine == ("http://a:1", "http://b:2")


def test_a_table_has_the_settings_of_its_command_below_the_environment_and_the_flags(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "stepwell.toml").write_text("[pool]\nshards = 2\nhistory_size = 2\ngroup_size = 2\n")
    monkeypatch.setenv("STEPWELL_POOL_HISTORY_SIZE", "3")
    given = {"group_size": 4, "max_staleness": None}
    otherwise = {"shards": 9, "journal": "here"}
    pool = layered(PoolSettings, "pool", read(*ENGINE), given=given, otherwise=otherwise)
    assert (pool.shards, pool.history_size, pool.group_size, pool.max_staleness) == (2, 3, 4, None)
    assert pool.journal == "here"


def test_a_wrong_value_in_a_table_is_named_with_its_table(folder: Path) -> None:
    (folder / "stepwell.toml").write_text("[pool]\nshards = 0\n")
    with pytest.raises(BadRequest, match=r"^\[pool\] shards must be at least 1$"):
        layered(PoolSettings, "pool", read(*ENGINE), given={}, otherwise={})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot = 1", "stepwell.toml: there is no setting 'prot'; there are: engine, "),
        ("[pool]\nshrads = 1", "stepwell.toml: [pool] takes no 'shrads'; it takes: name, shards, "),
        ("[gateway]\ncontrol_keys = ['x']", "stepwell.toml: [gateway] takes no 'control_keys'; it takes: "),
        ("[polo]\nshards = 1", "stepwell.toml: there is no setting 'polo'"),
        ("port = ", "stepwell.toml cannot be read: "),
        ("port = 70000", "--port must be at most 65535"),
    ],
)
def test_a_mistake_in_the_file_is_named(folder: Path, text: str, said: str) -> None:
    (folder / "stepwell.toml").write_text(text)
    with pytest.raises(BadRequest) as info:
        read(*ENGINE)
    assert str(info.value).startswith(said)


def test_without_an_engine_it_says_which_flag_is_missing() -> None:
    with pytest.raises(BadRequest, match="--engine is missing"):
        read()
    with pytest.raises(BadRequest, match="--engine: write the address of a running engine: http://host:port"):
        read("--engine", "127.0.0.1:8001")


def test_tables_are_not_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read("--help")
    shown = capsys.readouterr().out
    assert "--engine" in shown
    assert "--pool" not in shown


def test_status_has_a_json_flag() -> None:
    assert read_settings(StatusSettings, ["--json"], "stepwell status").as_json
