"""verl's sampler: instead of choosing among what verl's own rollouts wrote, it takes the pool's next batch.

Rows go to verl through its TransferQueue, with all that the actor reads in one write: the old log-probabilities are
those of the engine, which verl replaces if it is told to compute its own; where one is missing they are NaN, and the
trainer mode puts verl's own there. Between lease and training nothing waits, so
nothing becomes stale here: the pool's own rule decides, and `trainer.v1.sampler.max_off_policy_threshold`, if it is
set.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from stepwell.trainers.verl.mode_settings import connected_pool, read_mode_settings
from stepwell.trainers.verl.pool_feed import PoolFeed, QueueRow

EVICTED = "training/off_policy/evicted_samples"
"""verl's own name for groups that are too old."""


class PoolSampler:
    """`trainer.v1.sampler.custom_sampler`; verl passes its arguments by name."""

    def __init__(
        self,
        *,
        trainer_config: Mapping[str, Any],
        max_off_policy_threshold: int | None,
        **others: Any,
    ) -> None:
        self.settings = read_mode_settings(trainer_config)
        self.feed = PoolFeed(connected_pool(self.settings), self.settings)
        self._max_age = None if max_off_policy_threshold is None else max_off_policy_threshold - 1
        self._advantages: dict[str, torch.Tensor] = {}
        self.lacks_logprobs = False
        """Whether a token of the last batch has no recorded log-probability."""

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, float]]:
        """The rows of that many groups, in verl's queue, and our metrics."""
        taken = self.feed.take_rows(batch_size, self._max_age)
        offset = self.feed.version - (global_steps - 1)
        tags = [_tag(row, global_steps, offset) for row in taken.rows]
        keys = [row.key for row in taken.rows]
        fields = list_of_dict_to_tensordict([_fields(row) for row in taken.rows])
        tq.kv_batch_put(keys=keys, fields=fields, tags=tags, partition_id=partition_id)
        self.lacks_logprobs = bool(taken.chosen.missing.any())
        self._advantages = {row.key: torch.from_numpy(row.advantages) for row in taken.rows}
        metrics = {f"stepwell/{name}": float(value) for name, value in taken.metrics.items()}
        metrics[EVICTED] = metrics.pop("stepwell/groups_evicted")
        return KVBatchMeta(partition_id=partition_id, keys=keys, tags=tags), metrics

    def advantages(self, keys: Sequence[str]) -> list[torch.Tensor]:
        """The advantages of the last batch's rows; verl's own padding rows have one token, which is not trained."""
        return [self._advantages.get(key, torch.zeros(1)) for key in keys]


def _fields(row: QueueRow) -> dict[str, Any]:
    ids, mask = torch.from_numpy(row.ids), torch.from_numpy(row.mask)
    logprobs, advantages = torch.from_numpy(row.logprobs), torch.from_numpy(row.advantages)
    scores = torch.zeros(len(mask))
    scores[-1] = row.reward
    return {
        "prompts": ids[: row.prompt],
        "responses": ids[row.prompt :],
        "input_ids": ids,
        "position_ids": torch.arange(len(ids)),
        "response_mask": mask,
        "loss_mask": mask.clone(),
        "rollout_log_probs": logprobs,
        "old_log_probs": logprobs.clone(),
        "advantages": advantages,
        "returns": advantages.clone(),
        "rm_scores": scores,
        "uid": row.group,
        "num_turns": row.turns,
        "multi_modal_inputs": {},
        "extra_fields": {},
    }


def _tag(row: QueueRow, global_steps: int, offset: int) -> dict[str, Any]:
    return {
        "status": "success",
        "prompt_len": row.prompt,
        "response_len": len(row.mask),
        "seq_len": len(row.ids),
        "global_steps": global_steps,
        "min_global_steps": row.oldest - offset,
        "max_global_steps": row.newest - offset,
    }
