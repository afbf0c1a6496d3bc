"""S1, S2, S5: every candidate of the corpus scores 0, and nothing of it is left on the machine."""

import os
import secrets
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rig.waiting import wait_until
from stepwell.errors import RewardFailed
from stepwell.rewards.builtin.python_tests import TestRun
from stepwell.rewards.confinement.sandbox import SandboxLevel, open_sandbox
from tests.security.hostile_candidates import CORPUS, Hostile

SECONDS = 3.0
THREADS = 4


HARMLESS = (
    *("reads the worker's secret file", "reads the environment of the worker", "sees other processes"),
    *("connects to the machine", "uses an abstract socket of the machine", "memory without a file"),
    *("reads passwords", "opens a netlink socket", "System V memory"),
)
"""Attacks that can be tried without a sandbox."""

Verdict = Callable[[Hostile, SandboxLevel], str]


@pytest.fixture(scope="module")
def verdict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Verdict]:
    """Says why a candidate failed; empty if it passed."""
    secret = tmp_path_factory.mktemp("worker") / "key"
    secret.write_text("a key")
    name = f"stepwell-{secrets.token_hex(8)}"
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0{name}")
        abstract.listen()
        words = {
            "SECRET_PATH": str(secret),
            "LISTENING_PORT": str(listening.getsockname()[1]),
            "ABSTRACT_NAME": name,
            "WORKER_PID": str(os.getpid()),
        }

        def verdict(hostile: Hostile, level: SandboxLevel) -> str:
            run = TestRun(open_sandbox(level), SECONDS, 512)
            code = hostile.code
            for word, value in words.items():
                code = code.replace(word, value)
            try:
                return run.why_failed(code, hostile.test)[0]
            except RewardFailed as failure:
                return f"NO SCORE: {failure}"

        yield verdict


@pytest.fixture(scope="module")
def verdicts(verdict: Verdict) -> dict[str, str]:
    with ThreadPoolExecutor(THREADS) as threads:
        strict = [SandboxLevel.STRICT] * len(CORPUS)
        return dict(zip(CORPUS, threads.map(verdict, CORPUS.values(), strict), strict=True))


@pytest.mark.parametrize("name", CORPUS)
def test_a_hostile_candidate_scores_0(name: str, verdicts: dict[str, str]) -> None:
    assert verdicts[name] != "", "it passed"
    assert "NO SCORE" not in verdicts[name]


def test_the_corpus_is_large_and_its_attacks_reach_their_end(verdicts: dict[str, str]) -> None:
    """An attack whose own code is wrong would be held by accident."""
    assert len(CORPUS) >= 60
    mistakes = ("NameError", "IndentationError", "TypeError: attack", "No module named '", "is not defined")
    wrong = {name: why for name, why in verdicts.items() if any(mistake in why for mistake in mistakes)}
    assert wrong.keys() == {"writes a module that the test imports"}


@pytest.mark.parametrize("name", HARMLESS)
def test_without_a_sandbox_these_attacks_work(name: str, verdict: Verdict) -> None:
    if name == "reads passwords" and os.geteuid() != 0:
        pytest.skip("only root may read them")
    assert verdict(CORPUS[name], SandboxLevel.NONE) == ""


def test_nothing_of_a_candidate_is_left_on_the_machine(verdicts: dict[str, str]) -> None:
    assert verdicts
    wait_until(lambda: not processes_named("SURVIVOR"), "the processes of candidates to be gone")
    assert not [name for name in os.listdir("/dev/shm") if name.isdigit()]
    assert not list(Path("/sys/fs/cgroup").glob(f"*/**/stepwell-{os.getpid()}-*"))


def processes_named(name: str) -> list[str]:
    found = []
    for comm in Path("/proc").glob("[0-9]*/comm"):
        try:
            if comm.read_text().strip() == name:
                found.append(comm.parent.name)
        except OSError:
            continue
    return found
