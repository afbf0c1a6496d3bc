"""M1: environments written for Atropos' BaseEnv run on ours unchanged, and send the same groups."""

import json
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rig.atropos.processes import CHECKOUT, atropos_python, running
from rig.fake_engine import FakeEngine
from rig.rollout_server import FakeRolloutServer
from rig.threads import in_thread
from rig.waiting import wait_until

ENVIRONMENTS = CHECKOUT / "rig" / "atropos" / "environments"
STEPS = 4
"""With an evaluation and a checkpoint at every second."""
KINDS = {"sums": 6, "words": 6, "debates": 8}
"""The different groups that each environment makes."""
OURS_ALONE = ("policy_versions", "exactness", "name", "env_id")


@dataclass(frozen=True, slots=True)
class Run:
    groups: dict[str, dict[str, Any]]
    """By what they say of themselves."""
    hooks: set[str]
    evaluation: Any


@asynccontextmanager
async def training(folder: Path) -> AsyncIterator[tuple[FakeEngine, FakeRolloutServer]]:
    server = FakeRolloutServer(
        num_steps=100, max_token_len=512, save_checkpoint_interval=2, checkpoint_dir=folder / "checkpoints"
    )
    async with FakeEngine() as engine, server.opened():
        yield engine, server


@contextmanager
def served(command: list[str], engine: str, folder: Path) -> Iterator[Any]:
    more = {"HOOKS": str(folder / "hooks"), "EVALS": str(folder / "evals"), "ENGINE": f"{engine}/v1"}
    more["PYTHONPATH"] = str(CHECKOUT / "src") if command[0] == sys.executable else ""
    with running(command, folder / "env.log", more) as process:
        yield process


def run_of(name: str, python: list[str], tokenizer: Path, folder: Path) -> Run:
    """Serve until every kind of group has come, and a trainer has taken its steps."""
    folder.mkdir()
    with in_thread(training(folder)) as (engine, server):
        flags = ["--env.rollout_server_url", server.url, "--env.tokenizer_name", str(tokenizer)]
        command = [*python, str(ENVIRONMENTS / f"{name}.py"), "serve", *flags]
        with served(command, engine.url, folder) as process:

            def is_due() -> bool:
                assert process.poll() is None, (folder / "env.log").read_text()[-6000:]
                return server.has_batch()

            while server.step < STEPS or len(named(server.taken)) < KINDS[name]:
                wait_until(is_due, f"a batch of {name}", 120)
                server.train()
                noticed = server.status_calls + 2
                wait_until(partial(has_asked, server, noticed), "the step to be noticed", 30)
    evaluation = folder / "evals" / "metrics.json"
    return Run(
        named(server.taken),
        set((folder / "hooks").read_text().split("\n")),
        json.loads(evaluation.read_text()) if evaluation.exists() else None,
    )


def has_asked(server: FakeRolloutServer, times: int) -> bool:
    return server.status_calls >= times


def named(groups: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Without what is empty: Atropos writes nulls and empty lists for what a group does not have."""
    plain = [{key: value for key, value in group.items() if value and key not in OURS_ALONE} for group in groups]
    return {json.dumps(group["group_overrides"], sort_keys=True): group for group in plain}


@pytest.mark.parametrize("name", ["sums", pytest.param("words", marks=pytest.mark.nightly), "debates"])
def test_an_environment_sends_the_same_groups_and_has_the_same_hooks_called(
    name: str, tiny_model: Path, tmp_path: Path
) -> None:
    theirs = run_of(name, [str(atropos_python())], tiny_model, tmp_path / "theirs")
    ours = run_of(name, [sys.executable, "-m", "stepwell.envs"], tiny_model, tmp_path / "ours")
    assert len(theirs.groups) == KINDS[name]
    assert ours.groups == theirs.groups
    assert ours.hooks == theirs.hooks
    assert ours.evaluation == theirs.evaluation
