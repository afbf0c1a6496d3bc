"""The benchmark of live sessions, in its quick form, and what it measures with."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.live import ARMS
from benchmarks.live_rig.policy import LocalPolicy, warmed_up_model, words_of

CHECKOUT = Path(__file__).parents[3]


def test_live_sessions_move_the_weights_and_the_baseline_group_does_not() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.live", "--quick"], cwd=CHECKOUT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["ok"] is True
    moved = {arm.name: told["figures"][f"{arm.name}_moved"] for arm in ARMS}
    assert {name for name, change in moved.items() if change == 0.0} == {"live_group", "live_leave_one_out"}


def test_the_expected_reward_is_that_of_many_answers() -> None:
    policy, (_, words) = LocalPolicy(warmed_up_model(seed=0, steps=100), seed=0), words_of(0)
    expected = policy.expected_reward(words)
    answers = policy.answer(words * 30)
    assert 0.03 < expected < 0.5
    assert statistics.fmean(answer.is_right for answer in answers) == pytest.approx(expected, abs=0.03)
    assert all(len(answer.logprobs) == len(answer.response_ids) for answer in answers)
