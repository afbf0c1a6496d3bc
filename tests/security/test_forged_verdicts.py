"""Code decides neither the verdict of its tests nor whether there is one."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from stepwell.errors import RewardFailed
from stepwell.rewards.builtin.python_tests import TestRun
from stepwell.rewards.confinement.sandbox import Sandbox, SandboxLevel, open_sandbox
from tests.security.forgeries import FORGERIES
from tests.security.forgeries import ON_LIVE_OBJECTS as FORGERIES_ON_LIVE_OBJECTS
from tests.security.hostile_candidates import ON_LIVE_OBJECTS as CANDIDATES_ON_LIVE_OBJECTS
from tests.security.hostile_candidates import Hostile, in_values
from tests.security.unseen_forgeries import UNSEEN

SECONDS = 6.0
THREADS = 4
MISTAKES = ("NameError", "IndentationError", "SyntaxError: ", "No module named '", "is not defined")
"""A forgery whose own code is wrong would fail by accident."""
REFUSED = {
    *("globals_of_a_callback", "code_of_a_callback", "class_of_an_argument", "subclasses_of_object"),
    "callback_gets_a_hostile_value",
}
"""Unseen forgeries whose tests give the code a function or an object."""


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
    assert wrong == {"binds a name that the test binds only on success", "a coroutine by its name goes back"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_no_forgery_passes_or_evades_its_score_as_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3")  # the environment's own may be closed to other users
    without_numpy = {name: hostile for name, hostile in FORGERIES.items() if "numpy" not in hostile.code + hostile.test}
    assert passed_or_evaded(verdicts_of(Sandbox(SandboxLevel.USER), without_numpy)) == {}


@pytest.mark.parametrize("level", [SandboxLevel.STRICT, SandboxLevel.NONE])
def test_a_test_with_live_objects_is_refused_whatever_the_code_does(level: SandboxLevel) -> None:
    """So no code evades its score: there is none for right code either."""
    live = {**FORGERIES_ON_LIVE_OBJECTS, **CANDIDATES_ON_LIVE_OBJECTS}
    verdicts = verdicts_of(open_sandbox(level), live)
    assert {name for name, why in verdicts.items() if not why.startswith("NO SCORE: the test cannot be run")} == set()
    assert verdicts_of(open_sandbox(level), {name: Hostile("", each.test) for name, each in live.items()}) == verdicts


def test_no_forgery_that_was_written_without_the_judge_in_view_passes_or_evades_its_score() -> None:
    """In the strict sandbox only: some end every process that they may. A test that is refused is refused for any code;
    its forgery gets another test."""
    sandbox = open_sandbox(SandboxLevel.STRICT)
    unseen = {name: Hostile(forgery.code, forgery.tests) for name, forgery in UNSEEN.items()}
    verdicts = verdicts_of(sandbox, unseen)
    refused = passed_or_evaded(verdicts)
    assert refused.keys() == REFUSED
    assert verdicts_of(sandbox, {name: Hostile("", unseen[name].test) for name in refused}) == refused
    assert passed_or_evaded(verdicts_of(sandbox, {name: in_values(unseen[name]) for name in refused})) == {}
