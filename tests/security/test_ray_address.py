"""`ray_address=auto` joins no cluster that another user has written down: it could run code in this process."""

import os
import pwd
from pathlib import Path

import pytest

from stepwell.commands.state_folder import StateFolder
from stepwell.doctor import machine_checks
from stepwell.doctor.findings import Grade
from stepwell.errors import RayUnreachable
from stepwell.pool.client.ray_cluster import cluster_settings, join_ray, ray_start_file

STRANGER = 54321
THEIRS = "10.6.6.6:6379"


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without a cluster, on which Ray's folder is open to all users, as Ray makes it."""
    monkeypatch.setattr(os, "environ", {**os.environ, "RAY_TMPDIR": str(tmp_path)})
    os.environ.pop("RAY_ADDRESS", None)
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # another test of this process may have joined one
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray").chmod(0o777)
    return tmp_path


def written_down(mode: int = 0o644) -> Path:
    path = ray_start_file()
    path.write_text(THEIRS)
    path.chmod(mode)
    return path


def test_without_a_cluster_the_text_says_how_to_start_or_name_one() -> None:
    assert cluster_settings() == {}
    with pytest.raises(RayUnreachable, match="no Ray cluster of yours .* ray start --head.* --ray-address host:port"):
        join_ray("auto", "tests")


def test_what_this_users_ray_start_has_written_down_is_joined() -> None:
    written_down()
    assert cluster_settings() == {"RAY_ADDRESS": THEIRS}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of another user")
def test_a_file_of_another_user_is_not_followed() -> None:
    os.chown(written_down(), STRANGER, STRANGER)
    with pytest.raises(RayUnreachable, match=f"it belongs to user {STRANGER}.*--ray-address"):
        join_ray("auto", "tests")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to any group")
def test_a_file_that_a_group_can_change_is_followed_if_the_group_is_this_user_alone() -> None:
    path = written_down(0o664)
    os.chown(path, -1, pwd.getpwuid(0).pw_gid)
    assert cluster_settings() == {"RAY_ADDRESS": THEIRS}
    os.chown(path, -1, STRANGER)
    with pytest.raises(RayUnreachable, match="other users can change it"):
        cluster_settings()


@pytest.mark.parametrize("mode", [0o666, 0o646])
def test_a_file_that_others_can_change_is_not_followed(mode: int) -> None:
    written_down(mode)
    with pytest.raises(RayUnreachable, match="other users can change it"):
        join_ray("auto", "tests")


def test_a_link_and_a_second_name_are_not_followed(machine: Path) -> None:
    elsewhere = written_down().rename(machine / "elsewhere")
    ray_start_file().symlink_to(elsewhere)
    with pytest.raises(RayUnreachable, match="cannot be read as a file of yours"):
        cluster_settings()
    ray_start_file().unlink()
    ray_start_file().hardlink_to(elsewhere)
    with pytest.raises(RayUnreachable, match="hard link"):
        cluster_settings()


def test_a_pipe_is_not_waited_for() -> None:
    os.mkfifo(ray_start_file())
    with pytest.raises(RayUnreachable, match="not a regular file"):
        cluster_settings()


def test_the_state_folder_of_stepwell_up_comes_first_with_its_token() -> None:
    written_down()
    folder = StateFolder(Path.cwd() / ".stepwell")
    folder.make()
    joining = {"RAY_ADDRESS": "127.0.0.1:7", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/a b/ray_token"}
    folder.write_environment({"STEPWELL_KEY": "it's one", **joining})
    assert cluster_settings() == joining


def test_a_state_folder_that_is_not_ours_is_not_followed() -> None:
    folder = StateFolder(Path.cwd() / ".stepwell")
    folder.make()
    folder.write_environment({"RAY_ADDRESS": THEIRS})
    folder.path.chmod(0o755)
    with pytest.raises(RayUnreachable, match=r"\.stepwell names is not joined: other users can read it"):
        join_ray("auto", "tests")


def test_what_is_named_is_joined_whatever_is_written_down() -> None:
    written_down(0o666)
    os.environ["RAY_ADDRESS"] = "127.0.0.1:1"
    assert cluster_settings() == {"RAY_ADDRESS": "127.0.0.1:1"}
    with pytest.raises(RayUnreachable, match="no Ray cluster listens at 127.0.0.1:1"):
        join_ray("auto", "tests")


def test_the_doctor_does_not_follow_it_either() -> None:
    assert machine_checks.ray(None).grade is Grade.UNKNOWN
    written_down(0o666)
    finding = machine_checks.ray(None)
    assert (finding.grade, "other users can change it" in finding.what) == (Grade.WARNING, True)
