from pathlib import Path

import pytest
from stepwell.demo.live_outcome import (
    TurnReader,
    UserTurn,
    acceptance,
    failures,
    recent_acceptance,
    running_acceptance,
    write_turn,
)


def turns(*accepted: bool | None) -> list[UserTurn]:
    return [UserTurn(at=float(at), session="s", accepted=one) for at, one in enumerate(accepted)]


def test_what_is_written_is_read_as_it_comes(tmp_path: Path) -> None:
    path = tmp_path / "turns.jsonl"
    reader = TurnReader(path)
    assert reader.read() == []

    first, second = turns(True, None)
    with path.open("w") as file:
        write_turn(file, first)
        assert reader.read() == [first]
        assert reader.read() == []
        write_turn(file, second)
        assert reader.read() == [second]

    assert reader.turns == [first, second]


def test_half_a_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "turns.jsonl"
    with path.open("w") as file:
        write_turn(file, turns(True)[0])
    line = path.read_bytes()
    reader = TurnReader(path)

    path.write_bytes(line + line[:10])
    assert len(reader.read()) == 1
    path.write_bytes(line + line)
    assert len(reader.read()) == 1


def test_acceptance_is_that_of_judged_replies() -> None:
    assert acceptance(turns(True, None, False, True)) == pytest.approx(2 / 3)
    assert acceptance(turns(None)) is None


def test_the_recent_acceptance_forgets_what_is_long_ago() -> None:
    assert recent_acceptance(turns(False, False, True, None, True), window=2) == 1.0


def test_the_running_acceptance_begins_when_the_window_is_full() -> None:
    assert running_acceptance(turns(False, True, None, True), window=2) == [(1.0, 0.5), (3.0, 1.0)]
    assert running_acceptance(turns(True), window=2) == []


def test_failed_calls_are_counted_by_cause() -> None:
    failed = [UserTurn(at=0.0, session="s", failure="APITimeoutError"), *turns(True, None)]

    assert failures(failed) == {"APITimeoutError": 1}
