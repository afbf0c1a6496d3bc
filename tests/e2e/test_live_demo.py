"""`stepwell demo --task live`, the command itself, with two real vLLMs: too short to learn, but with canaries."""

import json
from pathlib import Path

import pytest

from rig.demo_command import demo, mentioning
from rig.vllm_server import vllm_python

UPDATES = 6


@pytest.mark.nightly
def test_users_are_served_while_versions_pass_their_canaries_and_no_process_is_left(tmp_path: Path) -> None:
    out = tmp_path / "live"
    flags = ("--task", "live", "--seed", "1", "--updates", str(UPDATES), "--out", str(out))
    done = demo(*flags, "--vllm-python", str(vllm_python()))

    assert done.returncode == 0, done.stdout + done.stderr
    outcome = json.loads((out / "outcome.json").read_text())
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert outcome["start"] <= 0.35
    assert outcome["failed_calls"] == {}
    assert outcome["decisions"]["canary"] >= 1
    assert outcome["decisions"]["promote"] >= 2
    assert [line["update"] for line in lines] == list(range(1, UPDATES + 1))
    assert all(line["rollouts_trained"] for line in lines)
    assert (out / "acceptance.png").read_bytes().startswith(b"\x89PNG")
    assert mentioning(str(out)) == []
