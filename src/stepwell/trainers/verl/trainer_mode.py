"""verl's V1 PPO trainer, fed from a pool: `trainer.v1.trainer_mode=stepwell`.

- Rollouts, their rows and advantages come from the pool (pool_sampler.py). verl computes losses and takes its steps.
- After each step the engines get the weights as the pool's next version (checkpoint_engine.py).
- With `trainer.save_freq`, a batch is acknowledged when a checkpoint that contains it is on disk; without, after its
  step. A run that is killed goes on from its last checkpoint: what that contains is not trained again, and what came
  after it comes back from the pool.
"""

import math
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transfer_queue as tq
from omegaconf import open_dict
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.utils.padding import response_from_nested

from stepwell.trainers.verl.mode_settings import require_usable
from stepwell.trainers.verl.pool_feed import PoolFeed
from stepwell.trainers.weight_sync import PROBE

PROBE_PARTITION = "stepwell-probe"


class NoPrompts:
    """Stands in for verl's data loader, whose place in the data set verl keeps in its checkpoints."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@register_trainer("stepwell")
class PoolTrainer(PPOTrainer):  # type: ignore[misc]  # verl has no types
    _enable_hybrid_replicas = False
    """verl starts no engines."""

    def __init__(self, config: Any) -> None:
        require_usable(config)
        with open_dict(config):
            section, data = config.trainer.v1.stepwell, config.data
            section.max_row_tokens = section.max_row_tokens or data.max_prompt_length + data.max_response_length
        super().__init__(config)
        groups = config.data.train_batch_size // self.parameter_sync_step
        self._mini_batches = max(1, groups // config.actor_rollout_ref.actor.ppo_mini_batch_size)
        with open_dict(config):
            config.actor_rollout_ref.rollout.n = 1  # groups are as large as agents make them

    @property
    def _feed(self) -> PoolFeed:
        feed: PoolFeed = self.replay_buffer.feed
        return feed

    @property
    def _checkpoint(self) -> Path:
        """The folder of this step's checkpoint."""
        return Path(self.config.trainer.default_local_dir).absolute() / f"global_step_{self.global_steps}"

    # -- hooks of verl's loop ------------------------------------------------------------------------------------------

    def fit(self, agent_loop_manager: Any) -> None:
        try:
            super().fit(agent_loop_manager)
        except BaseException:
            self._feed.give_back(also_trained=True)
            raise

    def on_init_end(self) -> None:
        self._sync_weights()

    def on_sample_end(self) -> None: ...

    def on_step_end(self) -> None:
        if self.config.trainer.save_freq <= 0:
            self._feed.acknowledge()
        self._feed.version += 1
        self._pending_sync_metrics = self._sync_weights()

    def prepare_step(self) -> dict[str, float]:
        """No prompts are handed out."""
        return {}

    def _init_dataloader(self) -> None:
        total = self.config.trainer.total_training_steps
        self.train_dataset = self.val_dataset = None
        self.train_dataloader, self.train_dataloader_it, self.val_dataloader = NoPrompts(), None, ()
        self.total_training_steps = self.steps_per_epoch = total
        with open_dict(self.config):
            self.config.actor_rollout_ref.actor.optim.total_training_steps = total * self.parameter_sync_step

    # -- one update ----------------------------------------------------------------------------------------------------

    def _step_once(self, metrics: dict[str, Any], timing_raw: dict[str, float], sample_batch_size: int) -> KVBatchMeta:
        batch = super()._step_once(metrics, timing_raw, sample_batch_size)
        self._feed.count_as_trained()
        return batch

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict[str, Any], **options: Any) -> KVBatchMeta:
        """Makes as many mini-batches as were asked for in groups, of equal numbers of rows, however many rows there
        are: a remainder would be an optimizer step of its own."""
        unit = self._rows_together()
        with open_dict(self.config):
            rows = math.ceil(len(batch) / (self._mini_batches * unit)) * unit
            self.config.actor_rollout_ref.actor.ppo_mini_batch_size = rows
        return super()._balance_batch(batch, metrics, **options)

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        if self.replay_buffer.lacks_logprobs:
            self._fill_logprobs(batch)
        return batch if self._is_written(batch) else super()._compute_old_log_prob(batch, metrics)

    def _fill_logprobs(self, batch: KVBatchMeta) -> None:
        """Verl's own log-probabilities, of its weights before this step, in place of missing ones."""
        temperature = self.config.actor_rollout_ref.rollout.temperature
        asked = {"calculate_entropy": False, "compute_loss": False, "temperature": temperature}
        where = {"keys": batch.keys, "partition_id": batch.partition_id}
        self.actor_rollout_wg.compute_log_prob(KVBatchMeta(**where, tags=batch.tags, extra_info=asked))
        found = tq.kv_batch_get(**where, select_fields=["log_probs", "response_mask", "rollout_log_probs"])
        own = response_from_nested(found["log_probs"], found["response_mask"])
        pairs = zip(found["rollout_log_probs"].unbind(), own.unbind(), strict=True)
        filled = [told.where(~told.isnan(), mine) for told, mine in pairs]
        logprobs = torch.nested.as_nested_tensor(filled, layout=torch.jagged)
        fields = TensorDict({"rollout_log_probs": logprobs, "old_log_probs": logprobs.clone()}, batch_size=len(filled))
        tq.kv_batch_put(**where, fields=fields)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """The advantages of whole rollouts in place of verl's; before them verl's own rollout correction, if it is
        on."""
        if self._is_written(batch):
            return batch
        if not self._has_engine_logprobs:
            batch = super()._compute_advantage(batch, metrics)
        advantages = torch.nested.as_nested_tensor(self.replay_buffer.advantages(batch.keys), layout=torch.jagged)
        fields = TensorDict({"advantages": advantages, "returns": advantages.clone()}, batch_size=len(batch.keys))
        tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)
        return batch

    @property
    def _has_engine_logprobs(self) -> bool:
        """Whether the old log-probabilities are those of the engine, and not verl's own."""
        return bool(self.config.algorithm.rollout_correction.bypass_mode)

    def _is_written(self, batch: KVBatchMeta) -> bool:
        """Whether the sampler has written all that the actor reads. verl makes its padding rows from a row of another
        length, so with these it has not."""
        return self._has_engine_logprobs and not any(tag.get("is_padding") for tag in batch.tags)

    def _rows_together(self) -> int:
        """A multiple of so many rows can be divided among the ranks, and each part into micro-batches."""
        known, config = self.actor_rollout_wg._dispatch_info, self.config.actor_rollout_ref
        if "actor" not in known:
            known["actor"] = self.actor_rollout_wg._query_dispatch_info("actor")
        ranks = int(max(known["actor"])) + 1
        if config.actor.use_dynamic_bsz:
            return ranks
        sizes = [config.actor.ppo_micro_batch_size_per_gpu, config.rollout.log_prob_micro_batch_size_per_gpu]
        if self.use_reference_policy:
            sizes.append(config.ref.log_prob_micro_batch_size_per_gpu)
        return ranks * math.lcm(*(size for size in sizes if size))

    # -- weights -------------------------------------------------------------------------------------------------------

    def _sync_weights(self) -> dict[str, float]:
        """Brings the weights to the engines under the feed's version."""
        workers, version = self.actor_rollout_wg, self._feed.version
        ranks, logprobs = workers.world_size, self._probe_logprobs()
        announced = workers.execute_checkpoint_engine(
            ["announce"] * ranks, version=[version] * ranks, logprobs=[logprobs] * ranks
        )
        for reply in announced:
            reply.future().result()
        replies = workers.update_weights(global_steps=version, mode=BACKEND)
        return {name: value for reply in replies for name, value in (reply.future().result() or {}).items()}

    def _probe_logprobs(self) -> list[float]:
        """The log-probabilities of the probe by verl's weights: the engines must compute the same."""
        ids = torch.tensor(PROBE)
        mask = torch.ones(len(PROBE) - 1, dtype=torch.int64)
        row = {
            "prompts": ids[:1],
            "responses": ids[1:],
            "input_ids": ids,
            "position_ids": torch.arange(len(ids)),
            "response_mask": mask,
            "loss_mask": mask.clone(),
            "multi_modal_inputs": {},
        }
        keys = [f"probe_{number}_0" for number in range(self._rows_together())]
        tags = [{"seq_len": len(PROBE), "prompt_len": 1, "response_len": len(mask)} for _ in keys]
        tq.kv_batch_put(
            keys=keys, fields=list_of_dict_to_tensordict([row] * len(keys)), tags=tags, partition_id=PROBE_PARTITION
        )
        asked = {"calculate_entropy": False, "compute_loss": False, "temperature": 1.0}
        batch = KVBatchMeta(partition_id=PROBE_PARTITION, keys=keys, tags=tags, extra_info=asked)
        try:
            self.actor_rollout_wg.compute_log_prob(batch)
            found = tq.kv_batch_get(
                keys=keys[:1], partition_id=PROBE_PARTITION, select_fields=["log_probs", "response_mask"]
            )
        finally:
            tq.kv_clear(keys=keys, partition_id=PROBE_PARTITION)
        logprobs = response_from_nested(found["log_probs"], found["response_mask"])
        return [float(value) for value in logprobs[0].tolist()]

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _save_checkpoint(self) -> None:
        """Ours is there before verl names the checkpoint as its latest; then what it contains is acknowledged."""
        self._feed.save(self._checkpoint)
        super()._save_checkpoint()
        shutil.rmtree(self._checkpoint / "transfer_queue", ignore_errors=True)  # the rows of this step, which is over
        self._feed.acknowledge()

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        for partition, rows in (tq.kv_list() or {}).items():  # if it was killed before it removed them
            with suppress(KeyError):
                tq.kv_clear(keys=list(rows), partition_id=partition)
        self._feed.begin(self._checkpoint if self.global_steps else None)
