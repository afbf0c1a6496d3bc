"""The doctor's command against the real vLLM: exact in every case, and printed as docs/doctor.md shows it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rig.vllm_server import VllmServer

PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"


def doctor(vllm: VllmServer, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stepwell", "doctor", "--engine", vllm.url, *flags]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture(scope="module")
def printed(vllm: VllmServer, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    done = doctor(vllm, tmp_path_factory.mktemp("doctor"), "--tokenizer-path", str(tiny_model))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_real_engine_is_exact(printed: str) -> None:
    assert printed.endswith("Exact: what a gateway records of this engine is what it sampled.\n")
    assert not re.search(r"^fault", printed, re.M), printed


def test_the_page_shows_what_is_printed(printed: str) -> None:
    shown = re.search(r"```text\n(engine .*?)```", PAGE.read_text(), re.S)
    assert shown is not None
    assert outline(shown[1]) == outline(printed), printed


def outline(report: str) -> list[str]:
    """Its lines, without what is told of the machine, and what is another in every run."""
    text = re.sub(r"(?m)^\S+ +(packages|control keys|disk|Ray|sandbox) .*(\n +→.*)?\n", "", report)
    return re.sub(r"http://\S+|begins after .*", "…", text).splitlines()


@pytest.mark.nightly
def test_as_json_every_cell_is_exact_that_can_be(vllm: VllmServer, tmp_path: Path) -> None:
    """Without a tokenizer, too: the engine says what its tokens spell."""
    done = doctor(vllm, tmp_path, "--json")
    report = json.loads(done.stdout)
    assert report["exact"] is True, done.stdout
    for case in report["cases"]:
        marks = {column: cell["mark"] for column, cell in case["cells"].items()}
        told = [marks[column] for column in ("ids", "logprobs", "text", "stream")]
        assert told == ["exact", "exact", "untold" if case["case"] == "reasoning" else "exact", "exact"], case
        if case["case"] not in ("tools", "unicode"):
            assert marks["rescored"] == "exact", case
        if case["case"] == "bridge":
            assert marks["prefix"] == "exact", case
