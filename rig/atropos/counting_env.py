"""An environment as users of atroposlib write them, run by the interpreter of its environment.

    python counting_env.py serve --env.rollout_server_url URL --env.tokenizer_name FOLDER

It asks no model: the rollouts of an item are the same each time, so that two runs can be compared. The items go round:
atroposlib throws work away when it pauses, and what was lost comes again. Items take turns at the three ways in which
groups are made: with all that the protocol has, by the default collect_trajectories, and several groups of one item.
"""

from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig  # type: ignore[import-not-found]

ITEMS, GROUP_SIZE = 18, 2
MAX_BATCHES_OFFPOLICY = 2

Json = dict[str, Any]


class CountingEnv(BaseEnv):  # type: ignore[misc]
    name = "counting"

    @classmethod
    def config_init(cls) -> tuple[Any, list[Any]]:
        config = BaseEnvConfig(
            group_size=GROUP_SIZE,
            max_batches_offpolicy=MAX_BATCHES_OFFPOLICY,
            max_token_length=512,
            use_wandb=False,
            wandb_name=cls.name,
        )
        nowhere = APIServerConfig(base_url="http://127.0.0.1:9/v1", api_key="none", model_name="none")
        return config, [nowhere]

    async def setup(self) -> None:
        self.asked = 0

    async def get_next_item(self) -> int:
        self.asked += 1
        return (self.asked - 1) % ITEMS

    async def collect_trajectory(self, item: int) -> tuple[Json, list[int]]:
        self.rollouts = getattr(self, "rollouts", 0) + 1
        rollout = self._rollout(f"{item}", self.rollouts % GROUP_SIZE)
        return rollout | {"group_overrides": {"item": item, "part": 0}}, []

    async def collect_trajectories(self, item: int) -> tuple[Any, list[int]]:
        if item % 3 == 0:
            return self._full_group(item, part=0), []
        if item % 3 == 1:
            group, backlog = await super().collect_trajectories(item)
            return group, backlog
        return [self._full_group(item, part) for part in range(2)], []

    async def evaluate(self, *args: object, **kwargs: object) -> None: ...

    def _rollout(self, question: str, number: int) -> Json:
        prompt = self.tokenizer.encode(f"Count to {question}: ")
        answer = self.tokenizer.encode(" ".join(map(str, range(number + len(question) + 3))))
        return {
            "tokens": prompt + answer,
            "masks": [-100] * len(prompt) + answer,
            "scores": number + len(question) / 10,
            "messages": [{"role": "user", "content": question, "reward": None}],
        }

    def _full_group(self, item: int, part: int) -> Json:
        """With every field of the protocol; log-probabilities are such that 32 bits hold them."""
        rollouts = [self._rollout(f"{item}.{part}", number) for number in range(GROUP_SIZE)]
        group: Json = {name: [rollout[name] for rollout in rollouts] for name in rollouts[0]}
        per_token = [[-(place % 64) / 64 for place in range(len(tokens))] for tokens in group["tokens"]]
        return group | {
            "inference_logprobs": [
                [1.0 if mask == -100 else logprob for mask, logprob in zip(masks, logprobs, strict=True)]
                for masks, logprobs in zip(group["masks"], per_token, strict=True)
            ],
            "advantages": per_token,
            "ref_logprobs": per_token,
            "generation_params": {"temperature": 0.7, "stop": ["\n"]},
            "overrides": [{"set_advantage_to_zero": bool(number)} for number in range(GROUP_SIZE)],
            "group_overrides": {"item": item, "part": part},
            "images": ["a picture", None],
            "distill_token_ids": [[[token, token + 1] for token in tokens] for tokens in group["tokens"]],
            "distill_logprobs": [[[value, value - 1] for value in values] for values in per_token],
        }


if __name__ == "__main__":
    CountingEnv.cli()
