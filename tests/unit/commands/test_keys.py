"""`stepwell keys` and `stepwell audit verify`, as a person calls them."""

import json
from pathlib import Path

import pytest

from stepwell import cli
from stepwell.access.audit_log import AuditLog
from stepwell.access.caller import ANYONE, Role
from stepwell.access.key_file import KeyFile
from stepwell.cli import main


@pytest.fixture(autouse=True)
def _leave_the_process_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command sets the umask and the logs of its own process."""
    monkeypatch.setattr(cli, "keep_files_private", lambda: None)
    monkeypatch.setattr(cli.logs, "setup", lambda **_: None)  # type: ignore[attr-defined]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def test_a_key_is_made_shown_once_listed_and_revoked(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["keys", "create", "--role", "runner", "--name", "math", "--channel", "a,b", "--keys-file", str(file)])
    made = capsys.readouterr()
    key, key_id = made.out.strip(), made.err.split(" · ")[0]
    caller = KeyFile(file).find(key.encode())
    assert caller is not None
    assert (caller.id, caller.role, caller.channels) == (key_id, Role.RUNNER, ("a", "b"))

    main(["keys", "list", "--keys-file", str(file)])
    shown = capsys.readouterr().out
    assert shown.startswith(f"{key_id} · runner · channel a, channel b · made ")
    assert " · valid until " in shown
    assert key not in shown

    main(["keys", "revoke", key_id, "--keys-file", str(file)])
    assert capsys.readouterr().out.endswith(" · was revoked\n")
    assert KeyFile(file).find(key.encode()) is None
    main(["keys", "list", "--json", "--keys-file", str(file)])
    (entry,) = json.loads(capsys.readouterr().out)
    assert entry["revoked_at"]
    assert "digest" not in entry


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["keys", "create", "--role", "king"], "--role must be 'session', "),
        (["keys", "create", "--role", "viewer", "--channel", "c"], "the role viewer sees all channels"),
        (["keys", "revoke", "nobody"], "has no key 'nobody'"),
    ],
)
def test_a_mistake_is_told_in_one_line(
    file: Path, words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*words, "--keys-file", str(file)])
    assert why in capsys.readouterr().err


def test_without_a_file_and_a_folder_of_up_the_flag_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["keys", "list"])
    assert "give --keys-file FILE" in capsys.readouterr().err
    (tmp_path / ".stepwell").mkdir(mode=0o700)
    main(["keys", "create", "--role", "viewer"])
    assert (tmp_path / ".stepwell" / "keys.json").exists()


def test_a_log_is_checked_and_a_changed_one_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path)
    for _ in range(3):
        log.add(ANYONE, "POST /engines", 200)
    log.close()
    main(["audit", "verify", str(path)])
    shown = capsys.readouterr().out
    assert shown.startswith("3 lines, unbroken; the last has the hash ")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]))
    main(["audit", "verify", str(path)])
    with pytest.raises(SystemExit):
        main(["audit", "verify", str(path), "--seen", shown.split()[-1]])
    path.write_text(lines[0] + lines[2])
    with pytest.raises(SystemExit):
        main(["audit", "verify", str(path)])
    assert "line 2 does not follow the line before it" in capsys.readouterr().err
