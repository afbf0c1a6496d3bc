"""The rig that kills a program at random moments."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rig.trainers.lives import Lives, passes_for


@pytest.mark.parametrize("seed", range(3))
def test_no_life_ends_by_itself_however_late_its_kill_comes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int
) -> None:
    wait = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: wait(seconds + 0.1))
    kills, done = 3, tmp_path / "passes"
    done.write_text("")

    def live(passes: Callable[[], None]) -> None:
        while len(done.read_text()) < passes_for(kills):
            passes()
            with done.open("a") as file:
                file.write(".")

    lives = Lives(live, seed)
    lives.kill(kills)

    assert len(lives.moments) == kills
    assert lives.run() == 0
    assert len(done.read_text()) == passes_for(kills)
