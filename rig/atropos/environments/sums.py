"""Asks for n answers at once and tokenizes them itself; its own wandb table; no item every other time.

Written for atroposlib, as its users write: only its names are imported. Each hook that is called is noted in $HOOKS.
"""

import os
from typing import Any

import wandb
from atroposlib.envs.base import (  # type: ignore[import-not-found]
    APIServerConfig,
    BaseEnv,
    BaseEnvConfig,
    EvalHandlingEnum,
    ScoredDataGroup,
)
from atroposlib.type_definitions import Item  # type: ignore[import-not-found]
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer  # type: ignore[import-not-found]

ITEMS = 6


def note(hook: str) -> None:
    with open(os.environ["HOOKS"], "a") as file:
        file.write(f"{hook}\n")


class ListTemplate:
    """transformers 5 makes a dictionary unless it is told not to; atroposlib 0.4.0 expects a list."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_token_id

    def apply_chat_template(self, chat: Any, **options: Any) -> Any:
        return self._tokenizer.apply_chat_template(chat, **{**options, "return_dict": False})


class SumsConfig(BaseEnvConfig):  # type: ignore[misc]
    digits: int = 2


class SumsEnv(BaseEnv):  # type: ignore[misc]
    name = "sums"
    env_config_cls = SumsConfig

    def __init__(self, config: Any, server_configs: Any, slurm: bool = True, testing: bool = False) -> None:
        super().__init__(config, server_configs, slurm, testing)
        self.percent_correct_buffer: list[float] = []
        self.asked = 0

    @classmethod
    def config_init(cls) -> tuple[Any, list[Any]]:
        config = SumsConfig(
            group_size=2,
            use_wandb=True,
            total_steps=100,
            steps_per_eval=2,
            max_token_length=512,
            eval_handling=EvalHandlingEnum.LIMIT_TRAIN,
            ensure_scores_are_not_same=False,
            num_rollouts_per_group_for_logging=-1,
            min_items_sent_before_logging=0,
            wandb_name=cls.name,
        )
        server = APIServerConfig(
            model_name="tiny",
            base_url=os.environ["ENGINE"],
            api_key="x",
            num_requests_for_eval=8,
            server_type="openai",
            health_check=False,
        )
        return config, [server]

    async def setup(self) -> None:
        note("setup")
        self.config.max_token_length = 256  # its users set what they like

    async def get_next_item(self) -> Item:
        self.asked += 1
        if self.asked % 2 == 0:
            note("get_next_item gave None")
            return None
        number = self.asked // 2 % ITEMS
        return {"question": f"{number} + {number}", "answer": str(2 * number)}

    async def collect_trajectories(self, item: Item) -> tuple[Any, list[Item]]:
        messages = [{"role": "user", "content": item["question"]}]
        reply = await self.server.chat_completion(messages=messages, n=self.config.group_size, max_tokens=8, seed=7)
        to_score = [
            (
                [*messages, {"role": "assistant", "content": choice.message.content}],
                item["answer"],
                choice.finish_reason,
            )
            for choice in reply.choices
        ]
        return await self.score(to_score), []

    async def score(self, rollouts: list[Any]) -> ScoredDataGroup:
        group = ScoredDataGroup()
        group["tokens"], group["masks"], group["scores"] = [], [], []
        for chat, answer, finish_reason in rollouts:
            tokenized = tokenize_for_trainer(ListTemplate(self.tokenizer), chat, finish_reason=finish_reason)
            group["tokens"].append(tokenized["tokens"])
            group["masks"].append(tokenized["masks"])
            group["scores"].append(1.0 if answer in chat[-1]["content"] else -1.0)
            self.percent_correct_buffer.append(max(group["scores"][-1], 0.0))
        group["group_overrides"] = {"item": rollouts[0][0][0]["content"]}
        return group

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        note("evaluate")
        reply = await self.server.chat_completion(
            messages=[{"role": "user", "content": "1 + 1"}], n=1, max_tokens=4, split="eval"
        )
        self.evaluated = len(reply.choices)

    async def add_rollouts_for_wandb(self, scored_data: Any, item: Item = None) -> None:
        note("add_rollouts_for_wandb")
        self.rollouts_for_wandb.append(
            [
                (self.tokenizer.decode(tokens), score, item["answer"])
                for tokens, score in zip(scored_data["tokens"], scored_data["scores"], strict=True)
            ]
        )

    async def create_rollout_table(self, wandb_metrics: dict[str, Any]) -> dict[str, Any]:
        note("create_rollout_table")
        if len(self.rollouts_for_wandb) > 0:
            table = wandb.Table(columns=["text", "score", "gold"])
            for group in self.rollouts_for_wandb:
                for row in group:
                    table.add_data(*row)
            wandb_metrics["train/rollouts"] = table
        self.rollouts_for_wandb: list[Any] = []
        return wandb_metrics

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        note("wandb_log")
        wandb_metrics = {} if wandb_metrics is None else wandb_metrics
        if self.percent_correct_buffer:
            correct = sum(self.percent_correct_buffer) / len(self.percent_correct_buffer)
            wandb_metrics["train/percent_correct"] = correct
            self.percent_correct_buffer = []
        await super().wandb_log(wandb_metrics)


if __name__ == "__main__":
    SumsEnv.cli()
