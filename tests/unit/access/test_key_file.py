import json
import os
from pathlib import Path

import pytest

from stepwell.access.access_keys import AccessKeys
from stepwell.access.caller import Role
from stepwell.access.key_file import KeyFile, create_key, read_keys, revoke_key
from stepwell.errors import BadRequest, NotPermitted

CONTROL = "control-key-of-the-tests"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def reading(path: Path, now: float = 0.0) -> KeyFile:
    """One that looks at the file each time."""
    return KeyFile(path, clock=lambda: now, interval=0.0)


def test_a_key_is_found_by_itself_and_the_file_does_not_have_it(path: Path) -> None:
    key, issued = create_key(path, Role.TRAINER, name="big-run", channels=["math"], projects=["search"])
    found = reading(path).find(key.encode())
    assert found is not None
    assert (found.id, found.role, found.channels, found.projects) == (issued.id, Role.TRAINER, ("math",), ("search",))
    assert issued.id.startswith("big-run-")
    assert key not in path.read_text()
    assert key.removeprefix("sk-swk-") not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert reading(path).find(key[:-1].encode()) is None
    assert reading(path).find(issued.digest.encode()) is None, "a hash is no key"
    assert reading(path).find(b"") is None


def test_a_key_is_void_after_its_time_and_after_it_was_revoked(path: Path) -> None:
    key, issued = create_key(path, Role.VIEWER, expires="30d", now=0.0)
    file = reading(path, 30 * 86_400 - 1)
    assert file.find(key.encode())
    assert reading(path, 30 * 86_400).find(key.encode()) is None
    assert revoke_key(path, issued.id, now=5.0).revoked_at == 5.0
    assert revoke_key(path, issued.id, now=9.0).revoked_at == 5.0
    assert file.find(key.encode()) is None, "the file is read again"
    assert file.find_id(issued.id) is None
    assert file.why_void(key.encode()) == f"the key {issued.id} was revoked"


def test_a_new_key_is_accepted_by_a_reader_that_runs_already(path: Path) -> None:
    file = reading(path)
    assert file.find(b"sk-swk-anything") is None
    first, _ = create_key(path, Role.RUNNER)
    assert file.find(first.encode())
    second, _ = create_key(path, Role.REWARD)
    assert file.find(first.encode())
    assert file.find(second.encode())
    assert len(read_keys(path)) == 2


def test_a_reader_looks_at_the_file_once_in_its_interval(path: Path) -> None:
    file = KeyFile(path, interval=3600.0)
    assert file.find(b"x") is None
    key, _ = create_key(path, Role.RUNNER)
    assert file.find(key.encode()) is None


@pytest.mark.parametrize("broken", ["", "{}", "[]", '{"keys": [{}]}', '{"keys": [{"role": "king"}]}', "\xff"])
def test_a_file_that_cannot_be_read_has_no_keys_and_starts_no_server(path: Path, broken: str) -> None:
    key, _ = create_key(path, Role.ADMIN)
    file = reading(path)
    assert file.find(key.encode())
    path.write_text(broken)
    assert file.find(key.encode()) is None
    with pytest.raises(BadRequest, match="is not a file of keys"):
        KeyFile(path)
    with pytest.raises(BadRequest, match="is not a file of keys"):
        create_key(path, Role.ADMIN)
    assert path.read_text() == broken


def test_a_file_that_others_can_change_is_not_used(path: Path) -> None:
    key, _ = create_key(path, Role.ADMIN)
    file = reading(path)
    path.chmod(0o620)
    assert file.find(key.encode()) is None
    with pytest.raises(BadRequest, match=r"others could have put keys into it \(its mode is 0620\)"):
        KeyFile(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_not_used(path: Path) -> None:
    create_key(path, Role.ADMIN)
    os.chown(path, 12345, 12345)
    with pytest.raises(BadRequest, match="others could have put keys into it"):
        KeyFile(path)


@pytest.mark.parametrize(
    ("role", "options", "why"),
    [
        (Role.TRAJECTORY, {}, "the gateway makes the keys of trajectories"),
        (Role.VIEWER, {"channels": ["c"]}, "the role viewer sees all channels"),
        (Role.ADMIN, {"projects": ["p"]}, "the role admin sees all channels"),
        (Role.SESSION, {"channels": ["a", "b"]}, "in one channel"),
        (Role.SESSION, {"projects": ["p"]}, "in one channel"),
        (Role.RUNNER, {"name": "Ann Other"}, "lower-case letters"),
        (Role.RUNNER, {"name": "a.b"}, "lower-case letters"),
        (Role.RUNNER, {"channels": ["a b"]}, "not the name of a channel"),
        (Role.RUNNER, {"expires": "soon"}, "is not a time such as 12h, 30d or 8w, or never"),
        (Role.RUNNER, {"expires": "0d"}, "is not a time"),
        (Role.RUNNER, {"expires": "999999w"}, "is not a time"),
    ],
)
def test_a_key_that_makes_no_sense_is_not_made(path: Path, role: Role, options: dict[str, str], why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        create_key(path, role, **options)  # type: ignore[arg-type]
    assert not path.exists()


def test_an_unknown_id_cannot_be_revoked(path: Path) -> None:
    create_key(path, Role.RUNNER)
    with pytest.raises(BadRequest, match="has no key 'nobody'"):
        revoke_key(path, "nobody")


def test_a_file_of_keys_needs_a_control_key(path: Path) -> None:
    with pytest.raises(BadRequest, match="--keys-file needs --control-keys"):
        AccessKeys([], KeyFile(path))


def test_a_project_is_the_first_part_of_a_channels_name(path: Path) -> None:
    key, _ = create_key(path, Role.RUNNER, channels=["judge"], projects=["search"])
    caller = reading(path).find(key.encode())
    assert caller
    assert all(map(caller.may_use, ("judge", "search", "search.train", "search.a.b")))
    assert not any(map(caller.may_use, ("judge.x", "searching", "train", "", "x.search", None)))
    with pytest.raises(NotPermitted, match="is for channel judge, project search; this is in the channel train"):
        caller.require_channel("train")


def test_entries_are_plain_json(path: Path) -> None:
    create_key(path, Role.ENVIRONMENT, channels=["c"], now=1.0, expires="1h")
    (entry,) = json.loads(path.read_text())["keys"]
    assert set(entry) == {
        *("id", "name", "role", "digest", "channels", "projects", "created_at", "expires_at", "revoked_at")
    }


def test_a_key_for_an_environment_is_read_from_a_file_of_0_2(path: Path) -> None:
    key, _ = create_key(path, Role.ENVIRONMENT, name="env")
    path.write_text(path.read_text().replace('"role": "environment"', '"role": "door"'))
    found = reading(path).find(key.encode())
    assert found is not None
    assert found.role is Role.ENVIRONMENT
