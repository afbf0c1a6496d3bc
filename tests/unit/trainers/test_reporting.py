import io
import json
import logging
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from stepwell.common.imports import install_command

from stepwell.errors import BadRequest
from stepwell.trainers.reporting import ToConsole, ToJsonl, ToWandb, UpdateMetrics, guarded

METRICS = UpdateMetrics(
    update=3,
    version=2,
    reward=0.25,
    rollouts=8,
    rollouts_trained=6,
    rows=6,
    tokens=120,
    staleness=1.5,
    fetch_seconds=0.5,
    train_seconds=0.25,
    save_seconds=0.0,
    sync_seconds=0.25,
    logprob_gap=float("nan"),
)


def test_the_console_gets_a_line_an_update() -> None:
    stream = io.StringIO()
    ToConsole(stream)(METRICS)
    assert stream.getvalue().startswith("update    3  reward  0.250 ")
    assert stream.getvalue().endswith("1.00 s (waited 0.50)\n")


def test_a_file_gets_an_object_an_update_that_any_json_reader_takes(tmp_path: Path) -> None:
    report = ToJsonl(tmp_path / "run" / "metrics.jsonl")
    report(METRICS)
    report(replace(METRICS, update=4))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines] == [3, 4]
    assert lines[0]["logprob_gap"] is None
    assert lines[0]["reward"] == 0.25


def test_a_report_that_fails_is_told_of_once_and_harms_nothing(caplog: pytest.LogCaptureFixture) -> None:
    asked = []

    def broken(metrics: UpdateMetrics) -> None:
        asked.append(metrics)
        raise OSError("the disk is full")

    report = guarded(broken)
    with caplog.at_level(logging.ERROR):
        report(METRICS)
        report(METRICS)
    assert len(asked) == 1
    assert "training continues" in caplog.text


def test_wandb_gets_every_update_from_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class Run:
        def log(self, numbers: dict[str, float | None], step: int) -> None:
            seen.append((step, numbers["reward"]))

        def finish(self) -> None:
            seen.append("finished")

    wandb = ModuleType("wandb")
    wandb.init = lambda **options: seen.append(options) or Run()  # type: ignore[attr-defined, func-returns-value]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    report = ToWandb("stepwell", mode="offline")
    report(METRICS)
    report.close()
    assert seen == [{"project": "stepwell", "mode": "offline"}, (3, 0.25), "finished"]


def test_without_wandb_one_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(BadRequest, match=re.escape(install_command("wandb"))):
        ToWandb("stepwell")
