"""Methods and attributes of Atropos' BaseEnv that its environments override or read while they serve."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rig.fake_engine import FakeEngine
from rig.rollout_server import FakeRolloutServer
from rig.waiting import until
from stepwell.envs import APIServerConfig, BaseEnv, BaseEnvConfig, Item, ServerBaseline
from stepwell.envs.loop import lifecycle
from stepwell.envs.scored_data import Groups
from tests.integration.envs.counting import CountingEnv


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Hooked(CountingEnv):
    def __init__(self, config: BaseEnvConfig) -> None:
        super().__init__(config)
        self.handled: list[tuple[str, Any, bool]] = []
        self.checked: list[tuple[int, int]] = []
        self.rounds_with_workers = 0
        self.makes_groups = True
        self.ended: list[int] = []

    async def handle_env(self, item_uuid: str) -> Groups:
        item = self.running_items[item_uuid]["item"]
        groups = await super().handle_env(item_uuid)
        self.handled.append((item_uuid, item, groups is not None))
        return groups

    async def add_train_workers(self) -> None:
        self.rounds_with_workers += 1
        if self.makes_groups:
            await super().add_train_workers()

    async def env_step_checks(self) -> None:
        self.checked.append((self.curr_step, self.status_dict["current_step"]))
        await super().env_step_checks()

    async def evaluate(self, *args: Any, **kwargs: Any) -> Mapping[str, float]:
        for number in range(3):
            task = asyncio.create_task(self._evaluate_one(number))
            self.eval_workers.add(task)
            task.add_done_callback(self.eval_workers.discard)
        return {"eval/accuracy": 1.0}

    async def _evaluate_one(self, number: int) -> None:
        await self.may_end_evaluation.wait()
        self.ended.append(number)


class ServersEnv(BaseEnv):
    async def get_next_item(self) -> Item:
        return None


@contextlib.asynccontextmanager
async def served(env: Hooked) -> AsyncIterator["asyncio.Task[None]"]:
    task = asyncio.create_task(lifecycle.serve(env))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def hooked(url: str = "http://127.0.0.1:9", **config: Any) -> Hooked:
    return Hooked(BaseEnvConfig(rollout_server_url=url, group_size=4, max_num_workers=2, **config))


async def test_every_item_goes_through_handle_env() -> None:
    async with FakeRolloutServer().opened() as rollouts:
        env = hooked(rollouts.url)
        env.last_item = 2
        async with served(env) as task:
            await asyncio.wait_for(task, 60)
    assert sorted(item for _, item, _ in env.handled) == [0, 1, 2]
    assert all(has_groups for _, _, has_groups in env.handled)
    assert len(rollouts.taken) == 3
    assert env.cleanups == 3


async def test_an_environment_without_train_workers_makes_its_groups_in_its_step_checks() -> None:
    async with FakeRolloutServer().opened() as rollouts:
        env = hooked(rollouts.url)
        env.makes_groups = False
        async with served(env):
            await until(lambda: env.rounds_with_workers >= 2, "two rounds")
            rollouts.queue += [{"tokens": [[1]] * 4}] * 2
            rollouts.train()
            await until(lambda: (1, 1) in env.checked, "the new step")
    assert env.begun == []
    assert (0, 1) in env.checked, "curr_step is still the old one while status_dict has the new one"


async def test_what_the_rollout_server_told_is_there(tmp_path: Path) -> None:
    trainer = {"checkpoint_dir": str(tmp_path), "save_checkpoint_interval": 5}
    async with FakeRolloutServer(**trainer).opened() as rollouts:
        env = hooked(rollouts.url, wandb_name="mine")
        assert (env.checkpoint_dir, env.checkpoint_interval, env.env_id, env.status_dict) == ("", -1, None, {})
        async with served(env):
            await until(lambda: env.status_dict != {}, "a status")
    assert (env.checkpoint_dir, env.checkpoint_interval, env.env_id) == (str(tmp_path), 5, 0)
    assert env.wandb_prepend == "mine_0"
    assert {"current_step", "queue_size", "env_weight"} <= set(env.status_dict)


async def test_an_evaluation_ends_when_its_eval_workers_have_ended() -> None:
    env = hooked()
    env.may_end_evaluation.clear()
    evaluation = asyncio.create_task(lifecycle.evaluate(env))
    await until(lambda: len(env.eval_workers) == 0 and not evaluation.done(), "the workers to be awaited")
    env.may_end_evaluation.set()
    assert await asyncio.wait_for(evaluation, 60) == {"eval/accuracy": 1.0}
    assert sorted(env.ended) == [0, 1, 2]
    assert env.eval_workers == set()


async def test_an_eval_worker_that_fails_fails_the_evaluation() -> None:
    class Failing(Hooked):
        async def _evaluate_one(self, number: int) -> None:
            raise ValueError("no answer")

    with pytest.raises(ValueError, match="no answer"):
        await lifecycle.evaluate(Failing(BaseEnvConfig()))


async def test_wandb_gets_the_metrics_of_every_server_without_the_environments_name(
    two: tuple[FakeEngine, FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: dict[str, Any] = {}
    servers = [APIServerConfig(base_url=f"{engine.url}/v1", model_name="tiny") for engine in two]
    env = ServersEnv(BaseEnvConfig(), servers)
    env.wandb_prepend = "mine_0"
    monkeypatch.setattr(env.wandb, "log", lambda metrics, step: logged.update(metrics))
    for server in env.server.servers:
        await server.chat_completion(messages=[{"role": "user", "content": "?"}], max_tokens=4)
    await env.wandb_log({"train/own": 1.0})
    await env.close_servers()
    assert logged["mine_0_train/own"] == 1.0
    assert {"server/server_0_request_time_avg", "server/server_1_request_time_avg"} <= set(logged)


def test_the_default_config_init_is_the_environments_config_and_a_baseline() -> None:
    env, servers = CountingEnv.config_init()
    assert type(env) is BaseEnvConfig
    assert type(servers) is ServerBaseline


def test_the_classes_of_flags_have_config_inits_result_as_defaults() -> None:
    class Mine(CountingEnv):
        @classmethod
        def config_init(cls) -> Any:
            return BaseEnvConfig(group_size=3), ServerBaseline(model_name="mine")

    for flags in (Mine.get_cli_serve_config_cls(), Mine.get_cli_process_config_cls()):
        assert flags.defaults is not None
        assert flags.defaults[0].group_size == 3
        assert isinstance(flags.defaults[1], ServerBaseline)


@pytest.mark.parametrize("name", ["off_policy_tolerance", "max_batches_offpolicy"])
def test_the_off_policy_tolerance_has_both_names(name: str) -> None:
    assert BaseEnvConfig(**{name: 5}).max_batches_offpolicy == 5  # type: ignore[arg-type]


async def test_what_is_no_group_is_dropped_and_counted_instead_of_failing(caplog: pytest.LogCaptureFixture) -> None:
    class Confused(CountingEnv):
        async def postprocess_histories(self, trajectories: Any) -> Any:
            return trajectories, []

    async with FakeRolloutServer().opened() as rollouts:
        env = Confused(BaseEnvConfig(rollout_server_url=rollouts.url, group_size=4))
        env.last_item = 0
        await asyncio.wait_for(lifecycle.serve(env), 60)
    assert env.failure_count.dropped == {"malformed": 1}
    assert "it is a tuple and no dictionary" in caplog.text
