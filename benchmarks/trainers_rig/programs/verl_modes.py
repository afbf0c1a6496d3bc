"""Modes of verl's V1 trainer for the benchmark. verl itself imports them (VERL_USE_EXTERNAL_MODULES).

- `from_memory`: all rows are in verl's TransferQueue before the first step, as if verl's own rollout workers had put
  them there. verl computes advantages and losses.
- In the mode `stepwell`, weights go to no engine here.
"""

import pickle
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from omegaconf import open_dict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from benchmarks.trainers_rig.recorded import PlainRow
from stepwell.trainers.verl.trainer_mode import NoPrompts, PoolTrainer

PARTITION = "train"

PoolTrainer._sync_weights = lambda self: {}  # type: ignore[method-assign]


@register_trainer("from_memory")
class MemoryTrainer(PPOTrainer):  # type: ignore[misc]  # verl has no types
    _enable_hybrid_replicas = False
    """verl starts no engines."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        with open_dict(config):
            config.actor_rollout_ref.rollout.n = self.replay_buffer.group_size

    def on_train_begin(self) -> None:
        self.replay_buffer.put_all()

    def on_sample_end(self) -> None: ...

    def on_step_end(self) -> None: ...

    def prepare_step(self) -> dict[str, float]:
        return {}

    def _init_dataloader(self) -> None:
        total = self.config.trainer.total_training_steps
        self.train_dataset = self.val_dataset = None
        self.train_dataloader, self.train_dataloader_it, self.val_dataloader = NoPrompts(), None, ()
        self.total_training_steps = self.steps_per_epoch = total
        with open_dict(self.config):
            self.config.actor_rollout_ref.actor.optim.total_training_steps = total


class MemorySampler:
    """`trainer.v1.sampler.custom_sampler`; gives the groups in their order."""

    def __init__(self, *, trainer_config: Mapping[str, Any], **others: Any) -> None:
        rows: list[PlainRow] = pickle.loads(Path(trainer_config["rows"]).read_bytes())
        self._groups = [list(group) for _, group in groupby(rows, key=lambda row: row.group)]
        self._next = 0

    @property
    def group_size(self) -> int:
        return len(self._groups[0])

    def put_all(self) -> None:
        for group in self._groups:
            fields = list_of_dict_to_tensordict([_fields(row, number) for number, row in enumerate(group)])
            tq.kv_batch_put(keys=_keys(group), fields=fields, tags=_tags(group), partition_id=PARTITION)

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, float]]:
        taken = self._groups[self._next : self._next + batch_size]
        self._next += batch_size
        keys = [key for group in taken for key in _keys(group)]
        tags = [{**tag, "global_steps": global_steps} for group in taken for tag in _tags(group)]
        return KVBatchMeta(partition_id=partition_id, keys=keys, tags=tags), {}


def _keys(group: Sequence[PlainRow]) -> list[str]:
    return [f"group{row.group}_{number}_0" for number, row in enumerate(group)]


def _prompt(row: PlainRow) -> int:
    """How many of its tokens come before the first trained one."""
    return int(np.flatnonzero(row.trained)[0])


def _tags(group: Sequence[PlainRow]) -> list[dict[str, Any]]:
    return [
        {
            "status": "success",
            "prompt_len": _prompt(row),
            "response_len": len(row.ids) - _prompt(row),
            "seq_len": len(row.ids),
            "global_steps": 0,
            "min_global_steps": 0,
            "max_global_steps": 0,
        }
        for row in group
    ]


def _fields(row: PlainRow, number: int) -> dict[str, Any]:
    prompt, ids = _prompt(row), torch.from_numpy(row.ids.astype(np.int64))
    mask = torch.from_numpy(row.trained[prompt:].astype(np.int64))
    scores = torch.zeros(len(mask))
    scores[-1] = row.reward
    return {
        "prompts": ids[:prompt],
        "responses": ids[prompt:],
        "input_ids": ids,
        "position_ids": torch.arange(len(ids)),
        "response_mask": mask,
        "loss_mask": mask.clone(),
        "rollout_log_probs": torch.from_numpy(row.logprobs[prompt:]),
        "rm_scores": scores,
        "uid": f"group{row.group}",
        "session_id": number,
        "num_turns": 1,
        "data_source": "recorded",
        "multi_modal_inputs": {},
        "extra_fields": {"min_global_steps": 0, "max_global_steps": 0, "reward_extra_info": {}},
    }
