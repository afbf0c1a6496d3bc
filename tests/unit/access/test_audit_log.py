import json
from collections.abc import Callable
from pathlib import Path

import pytest

from stepwell.access.audit_log import FIRST, AuditLog, verify
from stepwell.access.caller import Caller, Role
from stepwell.errors import BadRequest, Conflict

ANN = Caller("ann-12345678", Role.RUNNER)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


def written(path: Path, *calls: str) -> list[bytes]:
    """The lines of the file, after these calls were added."""
    log = AuditLog(path, clock=lambda: 7.0)
    for call in calls:
        log.add(ANN, call, 200)
    log.close()
    return path.read_bytes().splitlines(keepends=True)


def test_a_line_says_who_did_what_when_with_which_result_after_which_line(path: Path) -> None:
    first, second = map(json.loads, written(path, "POST /engines", "DELETE /engines?address=http://a"))
    assert first == {
        "at": 7.0,
        "key": "ann-12345678",
        "role": "runner",
        "call": "POST /engines",
        "status": 200,
        "previous": FIRST,
        "hash": second["previous"],
    }
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_log_goes_on_where_it_was(path: Path) -> None:
    written(path, "a", "b")
    lines = written(path, "c")
    found = verify(lines)
    assert (found.lines, found.fault, found.last) == (3, "", json.loads(lines[-1])["hash"])


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda lines: [lines[0], lines[1].replace(b'"b"', b'"x"'), *lines[2:]], "line 2 was changed"),
        (lambda lines: [*lines[:3], lines[3].replace(b"200", b"500")], "line 4 was changed"),
        (lambda lines: [lines[0], *lines[2:]], "line 2 does not follow the line before it"),
        (lambda lines: lines[1:], "line 1 does not follow the line before it"),
        (lambda lines: [lines[0], lines[2], lines[1], lines[3]], "line 2 does not follow"),
        (lambda lines: [*lines, lines[3]], "line 5 does not follow"),
        (lambda lines: [*lines[:3], lines[3][:-1]], "line 4 is unfinished"),
        (lambda lines: [lines[0], b"\n", *lines[1:]], "line 2 is not an entry"),
        (lambda lines: [lines[0], b'{"call":"x"}\n', *lines[1:]], "line 2 is not an entry"),
    ],
)
def test_a_line_that_was_changed_removed_or_moved_is_found(
    path: Path, change: Callable[[list[bytes]], list[bytes]], fault: str
) -> None:
    lines = written(path, "a", "b", "c", "d")
    assert verify(lines).fault == ""
    assert verify(change(lines)).fault.startswith(fault)


def test_lines_that_were_cut_off_are_told_by_a_hash_that_was_noted(path: Path) -> None:
    lines = written(path, "a", "b", "c")
    noted = verify(lines).last
    assert verify(lines[:2]).fault == ""
    assert verify(lines[:2], noted).fault.startswith(f"no line has the hash {noted}")
    assert verify(written(path, "d"), noted).fault == ""


def test_an_empty_log_is_unbroken() -> None:
    assert verify([]).fault == ""


def test_a_line_that_a_crash_left_unfinished_is_removed_and_the_chain_goes_on(path: Path) -> None:
    lines = written(path, "a", "b")
    path.write_bytes(b"".join(lines) + lines[1][:20])
    assert [json.loads(line)["call"] for line in written(path, "c")] == ["a", "b", "c"]
    assert verify(path.read_bytes().splitlines(keepends=True)).fault == ""


def test_two_processes_do_not_write_one_file(path: Path) -> None:
    log = AuditLog(path)
    with pytest.raises(Conflict, match="another process writes"):
        AuditLog(path)
    log.close()
    AuditLog(path).close()


def test_what_is_not_a_log_is_not_written_to(path: Path) -> None:
    path.write_text("my notes\n")
    with pytest.raises(Conflict, match="the last line of .* is not an entry"):
        AuditLog(path)
    assert path.read_text() == "my notes\n"
    with pytest.raises(BadRequest, match="cannot be written"):
        AuditLog(path / "below")


def test_a_call_cannot_write_a_line_of_its_own(path: Path) -> None:
    lines = written(path, 'POST /x\n{"at":1}', "y" * 100_000)
    assert len(lines) == 2
    assert verify(lines).fault == ""
    assert len(lines[1]) < 2_000
