"""S11: a `.stepwell` that somebody else has prepared, with a key that they know, is refused with what to do."""

import os
from pathlib import Path

import pytest

from stepwell.cli import main
from stepwell.commands.state_folder import StateFolder, this_folder
from stepwell.errors import Forbidden

PLANTED = "a-key-that-somebody-else-knows-too"
STRANGER = 54321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of another user")


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / ".stepwell"


def plant(state: Path, mode: int = 0o700, key_mode: int = 0o600) -> Path:
    state.mkdir()
    state.chmod(mode)
    key = state / "key"
    key.write_text(PLANTED)
    key.chmod(key_mode)
    return key


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o755, 0o750, 0o1777])
def test_a_folder_that_others_can_change_or_read_is_refused(state: Path, mode: int) -> None:
    """A clone of a repository with such a folder has mode 0755."""
    plant(state, mode)
    with pytest.raises(Forbidden, match=rf"other users can (change|read) it \(its mode is {mode:04o}\)"):
        StateFolder(state).make()
    with pytest.raises(Forbidden):
        this_folder()


def test_the_refusal_says_what_to_do_and_that_helps(state: Path) -> None:
    plant(state, 0o755)
    with pytest.raises(Forbidden) as refused:
        StateFolder(state).make()
    assert f"mv {state} {state}.old" in str(refused.value)
    assert os.system(str(refused.value).rpartition(": ")[2]) == 0, "the last words are a command"
    StateFolder(state).make()


def test_a_link_is_refused(state: Path, tmp_path: Path) -> None:
    plant(tmp_path / "elsewhere")
    state.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Forbidden, match="it is a symbolic link"):
        StateFolder(state).make()


def test_a_link_to_nothing_is_refused(state: Path, tmp_path: Path) -> None:
    state.symlink_to(tmp_path / "nothing")
    with pytest.raises(Forbidden, match="it is a symbolic link"):
        StateFolder(state).make()
    assert not (tmp_path / "nothing").exists()


@as_root
def test_a_folder_of_another_user_is_refused(state: Path) -> None:
    plant(state)
    os.chown(state, STRANGER, STRANGER)
    with pytest.raises(Forbidden, match=f"it belongs to user {STRANGER}, and you are user 0"):
        StateFolder(state).make()


@pytest.mark.parametrize("command", ["up --engine http://127.0.0.1:1", "down", "status"])
def test_every_command_refuses_it(state: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    plant(state, 0o755)
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    assert ended.value.code == 1
    assert f"{state} is not used: other users can read it" in capsys.readouterr().err
    assert not (state / "logs").exists(), "nothing is written there"


def test_a_key_that_others_can_change_is_refused(state: Path) -> None:
    key = plant(state, key_mode=0o666)
    with pytest.raises(Forbidden, match=r"key is not used: other users can change it .* Remove it"):
        StateFolder(state).key()
    key.unlink()
    assert StateFolder(state).key() != PLANTED


@as_root
def test_a_key_of_another_user_is_refused(state: Path) -> None:
    os.chown(plant(state), STRANGER, STRANGER)
    with pytest.raises(Forbidden, match=f"it belongs to user {STRANGER}"):
        StateFolder(state).key()


@pytest.mark.parametrize("secret", ["key", "ray_token"])
def test_a_secret_that_is_a_link_is_refused(state: Path, tmp_path: Path, secret: str) -> None:
    state.mkdir(mode=0o700)
    (tmp_path / "known").write_text(PLANTED)
    (state / secret).symlink_to(tmp_path / "known")
    with pytest.raises(Forbidden, match="is not used: it cannot be read as a file of yours"):
        getattr(StateFolder(state), secret)()


def test_only_folders_that_are_ours_are_removed_with_the_files_of_the_last_ray(state: Path, tmp_path: Path) -> None:
    folder = StateFolder(state)
    folder.make()
    before, foreign, new = (tmp_path / name for name in ("sw-before", "precious", "sw-new"))
    for path in (before, foreign, new):
        path.mkdir(mode=0o700)
    folder.ray.symlink_to(foreign)
    folder.keep_ray_folder(before)
    folder.keep_ray_folder(new)
    assert foreign.exists()
    assert not before.exists()
    assert folder.ray.readlink() == new
