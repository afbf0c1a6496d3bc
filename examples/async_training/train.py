"""Rollouts go on while a trainer updates the weights and brings them to vLLM, in one program.

python examples/async_training/train.py MODEL [UPDATES]
"""

import asyncio
import itertools
import os
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from stepwell.agents.blackbox import BlackBoxAgentFlow
from stepwell.agents.dataset import Dataset
from stepwell.agents.rollout import Rollout
from stepwell.agents.rollouter import AsyncRollouter
from stepwell.pool.client import connect
from stepwell.trainers.reporting import UpdateMetrics
from stepwell.trainers.settings import Settings
from stepwell.trainers.trainer import AsyncTrainer
from stepwell.trainers.transfers import CheckpointTransfer
from stepwell.trainers.weight_sync import WeightSync

URL, KEY = os.environ["STEPWELL_URL"], os.environ["STEPWELL_KEY"]
WORDS = [{"word": "".join(letters)} for letters in itertools.permutations("abcdefgh", 3)]


async def reverse(rollout: Rollout) -> float:
    """The agent: it has the model reverse a word of three letters, and says what the answer is worth."""
    word = rollout.sample["word"]
    answer = await rollout.chat([{"role": "user", "content": word}], temperature=1.0, max_tokens=5)
    return float(answer["content"] == word[::-1])


class Progress:
    def __init__(self, rollouter: AsyncRollouter) -> None:
        self.counts = rollouter.counts

    def __call__(self, done: UpdateMetrics) -> None:
        print(
            f"update {done.update}: reward {done.reward:.2f}, {done.staleness:.1f} versions behind, "
            f"{self.counts.groups} groups made, vLLM has version {done.version}",
            flush=True,
        )


async def main(folder: Path, updates: int) -> None:
    torch.set_num_threads(1)  # on a small machine, the other cores are for vLLM and the rollouts
    flow = BlackBoxAgentFlow(URL, reverse, key=KEY, group_size=8)
    rollouter = AsyncRollouter(flow, Dataset(WORDS, seed=0), gateway=URL, concurrency=64)
    pool, model = connect("data_pool"), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sync = WeightSync(transfer=CheckpointTransfer(Path("weights"), like=folder), pool=pool)
    trainer = AsyncTrainer(
        pool,
        model,
        settings=Settings(groups=16, updates=updates, learning_rate=7e-4),
        sync=sync,
        reports=[Progress(rollouter)],
    )
    rollouts = asyncio.create_task(rollouter.run())
    await asyncio.to_thread(trainer.run)  # its calls block, so it has a thread; neither waits for the other
    rollouter.stop()
    await rollouts
    sync.close()
    model.save_pretrained("trained")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 120))
