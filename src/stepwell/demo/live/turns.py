"""What the users saw, reply by reply: a file that the users' process writes and the trainer's process follows.

Each line is one call of a session. A call that failed has its cause.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import TextIO

WINDOW = 200
"""Judged replies in a running acceptance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserTurn:
    at: float
    """Seconds since 1970."""
    session: str
    accepted: bool | None = None
    """None: the user did not judge the reply, or there was none."""
    thumb: bool = False
    """The user pressed a thumb."""
    failure: str = ""
    """Why there was no reply."""


def write_turn(file: TextIO, turn: UserTurn) -> None:
    """The line is in the file at once."""
    file.write(json.dumps(asdict(turn)) + "\n")
    file.flush()


class TurnReader:
    """Reads a file that grows; `turns` has all that was read."""

    def __init__(self, path: Path) -> None:
        self.turns: list[UserTurn] = []
        self._path = path
        self._offset = 0

    def read(self) -> Sequence[UserTurn]:
        """The new turns. A line that is not whole yet is left for the next time."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole = file.read().rpartition(b"\n")[0]
        self._offset += len(whole) + 1 if whole else 0
        new = [UserTurn(**json.loads(line)) for line in whole.splitlines()]
        self.turns += new
        return new


def acceptance(turns: Iterable[UserTurn]) -> float | None:
    """The share of judged replies that users accepted; None if none was judged."""
    judged = [turn.accepted for turn in turns if turn.accepted is not None]
    return sum(judged) / len(judged) if judged else None


def recent_acceptance(turns: Sequence[UserTurn], window: int = WINDOW) -> float | None:
    return acceptance([turn for turn in turns[-2 * window :] if turn.accepted is not None][-window:])


def running_acceptance(turns: Sequence[UserTurn], window: int = WINDOW) -> list[tuple[float, float]]:
    """For each judged reply after the first `window`: its time, and the acceptance of the `window` up to it."""
    judged = [turn for turn in turns if turn.accepted is not None]
    sums = list(accumulate((bool(turn.accepted) for turn in judged), initial=0))
    return [(judged[end - 1].at, (sums[end] - sums[end - window]) / window) for end in range(window, len(judged) + 1)]


def failures(turns: Iterable[UserTurn]) -> Counter[str]:
    """Failed calls by cause."""
    return Counter(turn.failure for turn in turns if turn.failure)
