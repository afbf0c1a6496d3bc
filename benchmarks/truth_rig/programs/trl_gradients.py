"""Gradients of TRL's AsyncGRPOTrainer: its own queue, packing, log-probabilities and loss, fed by Stepwell's rollout
worker. Runs in TRL's environment.

The model is the counted policy, which follows TRL's paths through the packed tokens as attention does. One function of
TRL is replaced: the one that asks CUDA for the device's name.
"""

import pickle
import sys
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from stepwell.trainers.trl_groups import PolicyVersions
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer  # type: ignore[import-not-found]

from benchmarks.truth_rig.gradients import CLIP, PAD, Case, OneBatch, uphill
from benchmarks.truth_rig.policy import ANSWERS, TreePolicy, next_state
from stepwell.errors import FetchTimeout
from stepwell.pool.client.batch import Batch
from stepwell.trainers import trl_callback as trl_old_logprobs
from stepwell.trainers.rows import choose_rows
from stepwell.trainers.trl import StepwellRolloutWorker, samples_of


class PackedPolicy(TreePolicy):
    """For tokens that are packed as a tree: the state of a token follows from the path to it."""

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor,
        *,
        tree_kv_index: torch.Tensor,
        tree_cu_seqlens_q: torch.Tensor,
        tree_cu_seqlens_k: torch.Tensor,
        **_: Any,
    ) -> Any:
        ids, starts_q, starts_k = input_ids[0].tolist(), tree_cu_seqlens_q.tolist(), tree_cu_seqlens_k.tolist()
        states: list[int] = []
        for segment in range(len(starts_q) - 1):
            path, along = tree_kv_index[starts_k[segment] : starts_k[segment + 1]].tolist(), [0]
            for place in path:
                along.append(next_state(along[-1], ids[place]))
            states += along[len(along) - (starts_q[segment + 1] - starts_q[segment]) :]
        return SimpleNamespace(last_hidden_state=self.table[torch.tensor(states)][None])


class PolicyModel(PreTrainedModel):  # type: ignore[no-untyped-call]
    """The table gives the logits, so the head changes nothing."""

    base_model_prefix = "model"

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__(PretrainedConfig())
        self.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
        self.model: TreePolicy = PackedPolicy(table)
        self.lm_head: torch.nn.Linear = torch.nn.Linear(ANSWERS, ANSWERS, bias=False)
        self.lm_head.weight = torch.nn.Parameter(torch.eye(ANSWERS), requires_grad=False)

    def get_output_embeddings(self) -> torch.nn.Linear:
        return self.lm_head


class DrainedPool(OneBatch):
    """Has its batch once, and waits for more until it is closed."""

    def __init__(self, batch: Batch) -> None:
        super().__init__(batch)
        self.closed, self._is_taken = Event(), False

    def fetch_batch(self, *args: object, **terms: object) -> Batch:
        if self._is_taken:
            self.closed.wait()
            raise FetchTimeout("there is no other batch")
        self._is_taken = True
        return super().fetch_batch()


def main() -> None:
    torch.set_num_threads(1)
    async_grpo_trainer.get_peak_flops_per_device = lambda *args: None
    asked, answer = map(Path, sys.argv[1:])
    gradients = [gradient(case) for case in pickle.loads(asked.read_bytes())]
    torch.save({"version": version("trl"), "gradients": gradients}, answer)


def gradient(case: Case) -> torch.Tensor:
    model, pool = PolicyModel(case.table), DrainedPool(case.batch)
    async_grpo_trainer.create_model_from_path = lambda *args, **terms: model
    rows = choose_rows(case.batch, (), case.rows)
    count = len(samples_of(rows, 0, PolicyVersions()))
    worker = StepwellRolloutWorker(
        pool, samples_ahead=count, temperature=case.temperature, advantage=case.advantage, credit=case.credit
    )
    with TemporaryDirectory() as folder:
        trainer = AsyncGRPOTrainer(
            "the counted policy",
            args=settings(folder, count, case.temperature),
            train_dataset=Dataset.from_dict({"prompt": ["the pool has the rollouts"]}),
            processing_class=SimpleNamespace(pad_token="-", pad_token_id=PAD, eos_token_id=PAD),
            rollout_worker=worker,
            weight_transfer=SimpleNamespace(),
        )
        worker.resume(None)
        worker.start()
        try:
            loader = trainer.get_train_dataloader().base_dataloader  # its wrapper waits for a second batch
            inputs = next(iter(loader))
        finally:
            pool.closed.set()
            worker.stop()
        trl_old_logprobs.install()
        trainer.current_gradient_accumulation_steps = 1
        trainer.compute_loss(trainer.model, inputs).backward()
    return uphill(model.model)


def settings(folder: str, samples: int, temperature: float) -> Any:
    return AsyncGRPOConfig(
        output_dir=folder,
        max_steps=1,
        per_device_train_batch_size=samples,
        gradient_accumulation_steps=1,
        token_budget=0,
        temperature=temperature,
        epsilon=CLIP,
        epsilon_high=CLIP,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


if __name__ == "__main__":
    main()
