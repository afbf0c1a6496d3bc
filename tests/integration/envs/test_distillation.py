"""A teacher's log-probabilities travel from its server with the groups to a trainer's batch."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rig.atropos.server import TRAINER, serve_atropos
from rig.fake_engine import FakeEngine
from rig.fake_engine.scoring import logprobs_of
from rig.local_pool import LocalPool
from rig.threads import in_thread
from stepwell.envs import APIServerConfig, Item, ScoredDataItem
from stepwell.envs.distillation import TeacherDistillationConfig, TeacherDistillationEnv
from stepwell.envs.loop import lifecycle
from stepwell.errors import BadRequest

ENVIRONMENT = """
from atroposlib.envs.teacher_distillation_env import TeacherDistillationConfig, TeacherDistillationEnv

class Distilled(TeacherDistillationEnv):
    async def get_next_item(self):
        return 1

    async def collect_trajectory(self, item):
        return {"tokens": [5, 6, 7], "masks": [-100, 6, 7], "scores": 1.0}, []

if __name__ == "__main__":
    Distilled.cli()
"""
TOKENS = [5, 6, 7]
TEACHER_IDS = [[], [6], [7]]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints and unsent groups are written to the working folder."""
    monkeypatch.chdir(tmp_path)


class Distilled(TeacherDistillationEnv):
    number = 0

    async def get_next_item(self) -> Item:
        self.number += 1
        return self.number

    async def collect_trajectory(self, item: Item) -> tuple[ScoredDataItem | None, list[Item]]:
        self.number += 1
        return {"tokens": TOKENS, "masks": [-100, 6, 7], "scores": float(self.number)}, []


class Kept:
    def __init__(self) -> None:
        self.groups: list[Any] = []

    def write(self, group: Any) -> None:
        self.groups.append(group)


def distilled(teacher: str, tiny_model: Path, url: str = "http://127.0.0.1:9", **config: Any) -> Distilled:
    settings = {"group_size": 2, "tokenizer_name": str(tiny_model), "teacher_enabled": True, **config}
    server = APIServerConfig(base_url=f"{teacher}/v1", model_name="tiny", tokenizer_name=str(tiny_model))
    return Distilled(TeacherDistillationConfig(rollout_server_url=url, **settings), [APIServerConfig()], [server])


async def test_a_trainers_batch_has_the_teachers_logprobs(
    engine: FakeEngine, pool: LocalPool, tiny_model: Path
) -> None:
    async with serve_atropos(pool) as url, aiohttp.ClientSession() as http:

        async def asked(method: str, path: str, body: Any = None) -> Any:
            async with http.request(method, url + path, json=body) as reply:
                return await reply.json()

        await asked("POST", "/register", {**TRAINER, "batch_size": 2, "num_steps": 1})
        await asked("GET", "/batch")
        env = distilled(engine.url, tiny_model, url, batch_size=2, total_steps=1, max_num_workers=1)
        task = asyncio.create_task(lifecycle.serve(env))
        try:
            async with asyncio.timeout(60):  # for a batch
                while (batch := (await asked("GET", "/batch"))["batch"]) is None:
                    assert not task.done()
                    await asyncio.sleep(0.05)
        finally:
            task.cancel()
    (group,) = batch
    assert group["distill_token_ids"] == [TEACHER_IDS, TEACHER_IDS]
    assert group["distill_logprobs"][0][0] == []
    of_tokens = [value for (value,) in group["distill_logprobs"][0][1:]]
    assert of_tokens == pytest.approx(logprobs_of(TOKENS[1:], 1))


@pytest.mark.parametrize("overrides", [{"skip_teacher_top_k": True}, {"teacher_top_k": -1}])
async def test_a_group_may_go_without_the_teacher(
    engine: FakeEngine, tiny_model: Path, overrides: dict[str, Any]
) -> None:
    env, kept = distilled(engine.url, tiny_model), Kept()

    async def with_overrides(trajectories: Any) -> Any:
        return {**trajectories, "group_overrides": overrides}

    env.postprocess_histories = with_overrides  # type: ignore[method-assign]
    await lifecycle.process(env, 1, kept)
    assert "distill_token_ids" not in kept.groups[0]


async def test_a_teacher_that_gives_no_logprobs_costs_no_group(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = Kept()
    async with FakeEngine(plain=True) as teacher:
        await lifecycle.process(distilled(teacher.url, tiny_model), 1, kept)
    assert "distill_token_ids" not in kept.groups[0]
    assert "sent without the teacher's log-probabilities" in caplog.text


def test_no_teacher_is_an_error_at_the_start() -> None:
    with pytest.raises(BadRequest, match=r"needs a teacher: --teacher\.base-url"):
        Distilled(TeacherDistillationConfig(teacher_enabled=True), [APIServerConfig()])


@pytest.mark.parametrize("is_in_file", [False, True])
def test_the_command_line_names_the_teacher(is_in_file: bool, tmp_path: Path, tiny_model: Path) -> None:
    file = tmp_path / "distilled.py"
    file.write_text(ENVIRONMENT)

    with in_thread(FakeEngine()) as engine:
        words = [
            *("process", "--groups", "1", "--env.group_size", "2", "--env.ensure_scores_are_not_same", "false"),
            *("--env.teacher_enabled", "true", "--env.tokenizer_name", str(tiny_model)),
        ]
        if is_in_file:
            (tmp_path / "file.yaml").write_text(
                f"teacher:\n  base_url: {engine.url}/v1\n  model_name: tiny\n  tokenizer_name: {tiny_model}\n"
            )
            words += ["--config", "file.yaml"]
        else:
            words += ["--teacher.base_url", f"{engine.url}/v1", "--teacher.model_name", "tiny"]
            words += ["--teacher.tokenizer_name", str(tiny_model)]
        command = [sys.executable, "-m", "stepwell.envs", str(file), *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "groups" / "groups.jsonl").read_text().replace(" ", "")
    assert '"distill_token_ids":[[[],[6],[7]],[[],[6],[7]]]' in text
