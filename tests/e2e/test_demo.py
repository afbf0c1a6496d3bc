"""The demo, as a user runs it, cut short: a model served by a real vLLM learns within a few dozen updates."""

import json
import subprocess
import sys
from pathlib import Path

UPDATES = 40
PNG = b"\x89PNG\r\n\x1a\n"


def test_the_demo_learns_and_leaves_its_numbers_and_a_picture(tmp_path: Path) -> None:
    words = f"demo --task rev --seed 1 --updates {UPDATES} --out {tmp_path}/out".split()
    done = subprocess.run(
        [sys.executable, "-m", "stepwell", *words], capture_output=True, text=True, timeout=420, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outcome = json.loads((tmp_path / "out" / "outcome.json").read_text())
    assert outcome["start"] <= 0.35
    assert outcome["end"] >= outcome["start"] + 0.15
    assert outcome["largest_gap"] <= 1e-3
    updates = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [update["update"] for update in updates] == list(range(1, UPDATES + 1))
    assert all(update["version"] == update["update"] for update in updates), "an update did not reach the engine"
    assert (tmp_path / "out" / "reward.png").read_bytes().startswith(PNG)
    assert f"after {UPDATES} updates" in done.stdout
