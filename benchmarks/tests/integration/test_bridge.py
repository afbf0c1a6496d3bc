"""The bridge benchmark without the environment of the harnesses."""

import asyncio
from pathlib import Path

import pytest

from benchmarks.bridge import run_harnesses


def test_without_their_environment_no_harness_is_run_and_the_reason_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STEPWELL_CACHE", str(tmp_path))
    assert asyncio.run(run_harnesses()) == {}
    assert "scripts/agent_envs.py" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
