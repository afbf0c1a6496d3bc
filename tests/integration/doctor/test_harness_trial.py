"""The trial of a harness by the doctor: a program in PATH, the real gateway, a fake engine."""

from pathlib import Path

import pytest

from rig.fake_engine import FakeEngine
from stepwell.agents.cli_agents import ClaudeCode
from stepwell.doctor.examination import examine
from stepwell.doctor.findings import Finding, Grade
from stepwell.doctor.harness_trial import TrialTimeouts, try_harness
from stepwell.doctor.local_gateway import open_local_gateway
from tests.integration.doctor.test_cases import spelled
from tests.integration.doctor.test_faults import found

REFUSED = """[ "$1" = --version ] && exec echo 1.0
python3 - <<END
import os, sys, urllib.error, urllib.request
try:
    address, json = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", {"content-type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(address, b"{}", json))
except urllib.error.HTTPError as refusal:
    sys.exit(f"status {refusal.code}")
END
"""
SILENT = """[ "$1" = --version ] && exec echo 1.0
exec sleep 60
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    (claude := folder / "claude").write_text(f"#!/bin/sh\n{script}")
    claude.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


async def tried(engine: FakeEngine, timeouts: TrialTimeouts) -> dict[str, Finding]:
    async with open_local_gateway(engine.url, None, None, spelled, None) as doctor:
        return {check.name: check.finding for check in await try_harness(doctor, ClaudeCode, timeouts)}


async def test_a_call_that_the_gateway_refuses_is_told_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, REFUSED)
    async with FakeEngine() as engine:
        checks = await tried(engine, TrialTimeouts())
    assert checks["harness"].what == f"{tmp_path / 'claude'}, 1.0"
    assert checks["harness calls"].grade is Grade.FAULT
    assert checks["harness calls"].what.startswith("it made 1 call: 1 to /v1/messages; 1 refused, the last with 400: ")
    assert checks["harness calls"].what.endswith("ended with exit code 1: status 400")
    assert checks["harness turns"].grade is Grade.UNKNOWN


async def test_a_harness_that_does_not_connect_in_time_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, SILENT)
    async with FakeEngine() as engine:
        checks = await tried(engine, TrialTimeouts(task=0.2))
    assert checks["harness calls"].what == "no call reached the gateway: claude did not end within 0.2 s"


async def test_a_report_with_a_harness_that_is_not_installed_is_not_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    async with FakeEngine() as engine:
        report = await examine(engine.url, harness="qwen-code")
    assert found(report, "harness").remedy == "npm install -g @qwen-code/qwen-code"
    assert [fault.remedy for fault in report.faults()] == ["npm install -g @qwen-code/qwen-code"]
    assert not report.is_exact
