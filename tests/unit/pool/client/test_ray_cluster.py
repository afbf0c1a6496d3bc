import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from stepwell.pool.client.ray_cluster import local_ray


class SlowRay:
    """Ray, whose processes do not start in its time at first."""

    def __init__(self, failures: list[Exception]) -> None:
        self.failures = failures
        self.started = 0

    def init(self, **_: Any) -> None:
        self.started += 1
        if self.failures:
            raise self.failures.pop(0)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowRay:
    slow = SlowRay([Exception("The current node timed out during startup. This could happen because …")])
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(ray, "init", slow.init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="127.0.0.1:1"))
    return slow


def test_ray_that_was_too_slow_to_start_is_started_once_more_and_that_is_said(
    slow: SlowRay, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with local_ray("tests", token=tmp_path / "token", store=2**27, folder=tmp_path) as settings:
        assert settings["RAY_ADDRESS"] == "127.0.0.1:1"
    assert slow.started == 2
    assert "it is started once more" in caplog.text


def test_any_other_failure_of_ray_is_told_at_once(slow: SlowRay, tmp_path: Path) -> None:
    slow.failures = [OSError("no space left")]
    with (
        pytest.raises(OSError, match="no space left"),
        local_ray("tests", token=tmp_path / "token", store=2**27, folder=tmp_path),
    ):
        pass
    assert slow.started == 1
