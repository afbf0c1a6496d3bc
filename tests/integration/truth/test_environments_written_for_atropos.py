"""M1: what an environment that was written for Atropos' BaseEnv relies on is there, and is called."""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from rig.rollout_server import FakeRolloutServer
from rig.waiting import until
from stepwell.envs import APIServerConfig, BaseEnv, BaseEnvConfig, Item, ScoredDataGroup, tokenize_for_trainer
from stepwell.envs.loop import lifecycle


class Letters:
    """A tokenizer: a letter is a token, and a turn begins with its role's first letter."""

    eos_token_id = ord(".")

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))

    def apply_chat_template(
        self, chat: list[dict[str, str]], add_generation_prompt: bool = False, **_: Any
    ) -> list[int]:
        text = "".join(f"{message['role'][0]}:{message['content']}." for message in chat)
        return [ord(letter) for letter in text + ("a:" if add_generation_prompt else "")]


class Waiting(BaseEnv):
    """Has an item every third time, and notes which hooks are called."""

    name = "waiting"

    def __init__(self, config: BaseEnvConfig, server_configs: Any, slurm: bool = True, testing: bool = False) -> None:
        super().__init__(config, server_configs, slurm, testing)
        self.hooks: list[str] = []
        self.asked = 0
        self.logged: list[dict[str, Any]] = []

    @property
    def tokenizer(self) -> Any:
        return Letters()

    async def get_next_item(self) -> Item:
        self.asked += 1
        return None if self.asked % 3 else self.asked

    async def collect_trajectories(self, item: Item) -> tuple[Any, list[Item]]:
        group: ScoredDataGroup = {"tokens": [[97, 98]] * 2, "masks": [[-100, 98]] * 2, "scores": [0.0, 1.0]}
        return group, []

    async def add_rollouts_for_wandb(self, scored_data: Any, item: Item = None) -> None:
        self.hooks.append(f"add_rollouts_for_wandb {item}")
        self.rollouts_for_wandb.append([("text", 1.0)])

    async def create_rollout_table(self, wandb_metrics: dict[str, Any]) -> dict[str, Any]:
        self.hooks.append("create_rollout_table")
        return await super().create_rollout_table(wandb_metrics)

    def perf_stats(self, metrics_dict: dict[str, Any]) -> dict[str, Any]:
        self.hooks.append("perf_stats")
        self.logged.append(super().perf_stats(metrics_dict))
        return self.logged[-1]


def waiting(url: str, **config: Any) -> Waiting:
    settings = BaseEnvConfig(group_size=2, rollout_server_url=url, min_items_sent_before_logging=0, **config)
    return Waiting(settings, [APIServerConfig()])


async def test_an_environment_without_an_item_waits_and_asks_again_and_its_hooks_are_called(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with FakeRolloutServer(batch_size=4).opened() as rollouts:
        env = waiting(rollouts.url, max_num_workers=2)
        with caplog.at_level(logging.INFO, "stepwell.envs"):
            serving = asyncio.create_task(lifecycle.serve(env))
            await until(lambda: len(rollouts.taken) >= 4 and env.asked >= 12, "items between the empty moments")
            await until(lambda: "paused: enough waits for the trainer" in caplog.text, "the pause to be logged")
            rollouts.train(2)
            await until(lambda: bool(env.logged) and "resumed" in caplog.text, "the step to be logged")
            assert not serving.done()
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
    assert {"add_rollouts_for_wandb 3", "create_rollout_table", "perf_stats"} <= set(env.hooks)
    names = set(env.logged[0])
    assert {"train/rollouts", "train/completion_lengths", "train/completion_lengths_p95"} <= names
    assert {f"train_perf/{what}_mean" for what in ("task_duration", "mainloop_timings")} <= names
    assert "train_perf/workers_added_per_attempt_max" in names
    assert (env.wandb_prepend, env.max_token_len) == ("waiting_0", 64)


def test_a_configuration_can_be_changed() -> None:
    config = BaseEnvConfig(group_size=2)
    config.group_size = 3
    assert config.group_size == 3


async def test_an_evaluation_is_saved_as_atropos_saves_it(tmp_path: Path) -> None:
    env = waiting("http://nowhere", data_dir_to_save_evals=str(tmp_path / "evals"), max_token_length=7)
    await env.evaluate_log({"eval/score": 0.5}, start_time=1.0, end_time=3.0, samples=[{"question": "?"}])
    saved = json.loads((tmp_path / "evals" / "metrics.json").read_text())
    assert saved["results"] == {"atropos|waiting_eval|0": {"eval/score": 0.5}, "all": {"eval/score": 0.5}}
    general = saved["config_general"]
    assert (general["total_evaluation_time_seconds"], general["generation_parameters"]) == (
        "2.0",
        {"max_new_tokens": 7},
    )
    assert json.loads((tmp_path / "evals" / "samples.jsonl").read_text()) == {"question": "?"}


CHAT = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "hi"},
    {"role": "user", "content": "r"},
    {"role": "assistant", "content": "yes"},
]


@pytest.mark.parametrize(
    ("options", "trained"),
    [({}, "yes."), ({"train_on_all_assistant_turns": True}, "hi.yes."), ({"finish_reason": "length"}, "yes")],
)
def test_a_chat_is_tokenized_with_the_last_or_every_answer_trained(options: dict[str, Any], trained: str) -> None:
    made = tokenize_for_trainer(Letters(), CHAT, **options)
    assert Letters().decode(made["tokens"]).startswith("u:q.a:hi.u:r.a:yes")
    pairs = [(token, mask) for token, mask in zip(made["tokens"], made["masks"], strict=True) if mask != -100]
    assert [token for token, _ in pairs] == [mask for _, mask in pairs] == [ord(letter) for letter in trained]
