"""wandb looks on; nothing it does can hold up or end an environment."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from rig.waiting import wait_until
from stepwell.envs.tracking import RolloutTable, WandbTracker
from stepwell.errors import BadRequest

RUN = {"name": "sums_0", "project": "p", "group": "g", "config": {"group_size": 4}}


ROLLOUTS = RolloutTable(("text", "score"), [("one", 0.5), ("two", 1.0)])


class FakeWandb:
    """Takes what it is given, holds when told to, and fails when told to."""

    def __init__(self) -> None:
        self.started: list[dict[str, Any]] = []
        self.logged: list[tuple[dict[str, Any], int | None]] = []
        self.is_finished = False
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.failures: set[str] = set()

    def init(self, **told: Any) -> "FakeWandb":
        self._maybe_fail("init")
        self.started.append(told)
        return self

    def log(self, metrics: dict[str, Any], step: int | None) -> None:
        self.goes_on.wait(30)
        self._maybe_fail("log")
        self.logged.append((metrics, step))

    def finish(self) -> None:
        self._maybe_fail("finish")
        self.is_finished = True

    def Table(self, columns: list[str], data: list[list[Any]]) -> list[list[Any]]:  # noqa: N802 - wandb's name
        self._maybe_fail("Table")
        return [columns, *data]

    def _maybe_fail(self, what: str) -> None:
        if what in self.failures:
            raise ConnectionError(f"no {what}")


async def test_metrics_and_tables_arrive() -> None:
    wandb = FakeWandb()
    tracker = WandbTracker(load=lambda: wandb)
    tracker.start(RUN)
    tracker.log({"train/score": 0.5, "train/rollouts": ROLLOUTS}, step=3)
    tracker.log({"train/score": 0.6}, step=4)
    await tracker.close()
    assert wandb.started == [{"name": "sums_0", "project": "p", "group": "g", "config": {"group_size": 4}}]
    table = [["text", "score"], ["one", 0.5], ["two", 1.0]]
    assert wandb.logged == [({"train/score": 0.5, "train/rollouts": table}, 3), ({"train/score": 0.6}, 4)]
    assert wandb.is_finished


async def test_a_slow_wandb_holds_no_one_up_and_what_does_not_fit_is_counted() -> None:
    wandb = FakeWandb()
    wandb.goes_on.clear()
    tracker = WandbTracker(queue_size=2, load=lambda: wandb)
    tracker.start(RUN)
    for n in range(100):
        tracker.log({"n": n})
    assert tracker.dropped >= 97
    wandb.goes_on.set()
    await tracker.close()
    assert len(wandb.logged) == 100 - tracker.dropped


async def test_the_count_of_what_was_dropped_is_logged() -> None:
    wandb = FakeWandb()
    tracker = WandbTracker(load=lambda: wandb)
    tracker.start(RUN)
    tracker.dropped = 5
    tracker.log({"n": 1})
    await tracker.close()
    assert wandb.logged == [({"n": 1, "tracking/dropped": 5}, None)]


@pytest.mark.parametrize("what", ["init", "log", "finish"])
async def test_a_failing_wandb_is_spoken_of_once(what: str, caplog: pytest.LogCaptureFixture) -> None:
    wandb = FakeWandb()
    wandb.failures = {what}
    tracker = WandbTracker(load=lambda: wandb)
    tracker.start(RUN)
    for n in range(3):
        tracker.log({"n": n})
    await tracker.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"wandb ({what}) fails; the environment goes on: ConnectionError: no {what}"
    ]


async def test_metrics_arrive_though_the_table_cannot_be_made(caplog: pytest.LogCaptureFixture) -> None:
    wandb = FakeWandb()
    wandb.failures = {"Table"}
    tracker = WandbTracker(load=lambda: wandb)
    tracker.start(RUN)
    for n in range(2):
        tracker.log({"n": n, "train/rollouts": ROLLOUTS})
    await tracker.close()
    assert wandb.logged == [({"n": 0}, None), ({"n": 1}, None)]
    assert caplog.text.count("wandb (table) fails; the environment goes on: ConnectionError: no Table") == 1


async def test_a_missing_wandb_says_what_to_install(caplog: pytest.LogCaptureFixture) -> None:
    def load() -> Any:
        raise BadRequest("use_wandb needs wandb: pip install 'stepwell[wandb]'")

    tracker = WandbTracker(load=load)
    tracker.start(RUN)
    tracker.log({"n": 1})
    await tracker.close()
    assert "pip install 'stepwell[wandb]'" in caplog.text


async def test_one_that_never_ends_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    wandb = FakeWandb()
    wandb.goes_on.clear()
    tracker = WandbTracker(queue_size=1, close_timeout=0.05, load=lambda: wandb)
    tracker.start(RUN)
    tracker.log({"n": 1})
    await tracker.close()
    assert "wandb did not end within 0.05 s" in caplog.text
    wandb.goes_on.set()


async def test_until_it_is_started_nothing_is_loaded() -> None:
    def load() -> Any:
        raise AssertionError("loaded")

    tracker = WandbTracker(load=load)
    tracker.log({"n": 1})
    await tracker.close()
    assert not tracker.is_on


async def real_run() -> None:
    tracker = WandbTracker(close_timeout=300.0)
    tracker.start(RUN)
    rollouts = RolloutTable(("text", "score"), [("what the model said", 1.0)])
    tracker.log({"train/score": 0.5, "train/rollouts": rollouts}, step=1)
    await tracker.close()


def test_a_real_run_is_written_offline(tmp_path: Path) -> None:
    """In a process of its own: wandb keeps the settings of the first run of a process."""
    program = f"import asyncio, {__name__} as tests; asyncio.run(tests.real_run())"
    settings = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[4],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (ended.returncode, "fails; the environment goes on" in ended.stderr) == (0, False), ended.stderr
    (run,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    wait_until(lambda: b"train/score" in run.read_bytes(), "wandb's own process to write the run")
    tables = list(tmp_path.glob("wandb/offline-run-*/files/media/table/train/rollouts*.json"))
    assert "what the model said" in tables[0].read_text()
