"""The survival benchmark in its shorter form: one row on real Ray, counted by the auditor."""

import json
import subprocess
import sys

from benchmarks.survival.__main__ import ROWS, chosen_rows


def test_a_stopped_shard_costs_no_call_and_no_step() -> None:
    command = [sys.executable, "-m", "benchmarks.survival", "--only", "stopped_shard", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["ok"], done.stdout + done.stderr
    assert last["figures"]["stopped_shard.rollouts"] > 0


def test_a_row_is_chosen_by_its_name_or_several_by_its_beginning() -> None:
    assert [row.name for row in chosen_rows("head_10s")] == ["head_10s"]
    assert len(chosen_rows("head")) == 4
    assert chosen_rows("") == list(ROWS)
