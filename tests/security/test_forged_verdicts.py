"""Code decides neither the verdict of its tests nor whether there is one."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from stepwell.errors import RewardFailed
from stepwell.rewards.builtin.python_tests import TestRun
from stepwell.rewards.confinement.sandbox import Sandbox, SandboxLevel, open_sandbox
from tests.security.forgeries import FORGERIES
from tests.security.hostile_candidates import Hostile
from tests.security.unseen_forgeries import UNSEEN

SECONDS = 6.0
THREADS = 4
MISTAKES = ("NameError", "IndentationError", "SyntaxError: ", "No module named '", "is not defined")
"""A forgery whose own code is wrong would fail by accident."""


def verdicts_of(sandbox: Sandbox, corpus: dict[str, Hostile]) -> dict[str, str]:
    """Why each failed; empty if it passed."""

    def verdict(hostile: Hostile) -> str:
        try:
            return TestRun(sandbox, SECONDS, 512).why_failed(hostile.code, hostile.test)[0]
        except RewardFailed as failure:
            return f"NO SCORE: {failure}"

    with ThreadPoolExecutor(THREADS) as threads:
        return dict(zip(corpus, threads.map(verdict, corpus.values()), strict=True))


def passed_or_evaded(verdicts: dict[str, str]) -> dict[str, str]:
    return {name: why for name, why in verdicts.items() if not why or why.startswith("NO SCORE")}


@pytest.mark.parametrize("level", [SandboxLevel.STRICT, SandboxLevel.NONE])
def test_no_forgery_passes_or_evades_its_score(level: SandboxLevel) -> None:
    verdicts = verdicts_of(open_sandbox(level), FORGERIES)
    assert passed_or_evaded(verdicts) == {}
    wrong = {name for name, why in verdicts.items() if any(mistake in why for mistake in MISTAKES)}
    assert wrong == {"binds a name that the test binds only on success"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_no_forgery_passes_or_evades_its_score_as_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3")  # the environment's own may be closed to other users
    without_numpy = {name: hostile for name, hostile in FORGERIES.items() if "numpy" not in hostile.code + hostile.test}
    assert passed_or_evaded(verdicts_of(Sandbox(SandboxLevel.USER), without_numpy)) == {}


def test_no_forgery_that_was_written_without_the_judge_in_view_passes_or_evades_its_score() -> None:
    """In the strict sandbox only: some end every process that they may."""
    unseen = {name: Hostile(forgery.code, forgery.tests) for name, forgery in UNSEEN.items()}
    assert passed_or_evaded(verdicts_of(open_sandbox(SandboxLevel.STRICT), unseen)) == {}
