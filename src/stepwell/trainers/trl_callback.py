"""TRL's checkpoints contain what was trained of the pool's groups: resume, and each group is trained exactly once.

    trainer = AsyncGRPOTrainer(…, rollout_worker=worker, callbacks=[StepwellCallback(worker)])
    trainer.train(resume_from_checkpoint=last_checkpoint("out"))

- The state of the groups is in `trainer_state.json`, the last file of a checkpoint: one that contains it is complete.
- Groups are acknowledged when that file is written. With `save_strategy="no"`, after each update.
- Tokens that were recorded without a log-probability have a ratio of 1 in TRL's loss, with the gradient that it has.
  TRL subtracts the old log-probabilities from those of the model within `compute_loss`, and has no hook between. Old
  ones that are missing are NaN up to there. Here they become 0, and the model's output gets the value 0 at the same
  places and keeps its gradient. It is TRL's own pass, on whatever rank and packed as it is: nothing is computed twice.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from stepwell.errors import BadRequest
from stepwell.trainers.trl import StepwellRolloutWorker
from stepwell.trainers.trl_groups import SampleNumber, TrlProgress

if TYPE_CHECKING:
    import torch

STATE_FILE = "trainer_state.json"
GROUPS = "groups"
TRAINER_MODULE = "trl.experimental.async_grpo.async_grpo_trainer"
MARK = "stepwell_counts_missing_logprobs"
USED = ("old_log_probs", "token_index")
"""The fields of a micro-batch that are used: for each trained token of each sample, what the model's output is compared
with, and where it is in that output. The places of padding are negative."""


class StepwellCallback(TrainerCallback, ExportableState):
    """Pass it to AsyncGRPOTrainer as one of its `callbacks`."""

    def __init__(self, worker: StepwellRolloutWorker) -> None:
        self._worker = worker

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint; TRL calls this for each one."""
        return {"args": {}, "attributes": {GROUPS: self._worker.progress.state()}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Comes before TRL starts the worker."""
        install()
        if not state.is_world_process_zero:
            return
        collator: Any = getattr(others.get("train_dataloader"), "collate_fn", None)
        if not hasattr(collator, "groups_trained"):
            raise BadRequest("this TRL does not say which groups it trains; trl 1.16.0 does")
        collator.groups_trained = CollatedGroups(collator.groups_trained, self._worker.progress)
        self._worker.resume(_saved(state) if state.global_step else None)

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        if state.is_world_process_zero:
            self._worker.progress.train()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        if state.is_world_process_zero:
            self._worker.progress.train()
            if args.save_strategy == "no":
                self._worker.commit()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        if state.is_world_process_zero:
            self._worker.commit()


class CollatedGroups:
    """Takes the place of the set in which TRL's collator collects group numbers, one for each sample."""

    def __init__(self, collected: set[int], progress: TrlProgress) -> None:
        self._collected = collected
        self._progress = progress

    def update(self, numbers: Iterable[SampleNumber]) -> None:
        samples = list(numbers)
        self._collected.update(samples)
        self._progress.collate(samples)


def last_checkpoint(folder: str | Path) -> str | None:
    """The newest complete checkpoint in TRL's `output_dir`; None if there is none yet. A trainer that was killed while
    it saved has left one that is not complete, which TRL's own `resume_from_checkpoint=True` would take."""
    by_step = {int(path.name.rpartition("-")[2]): path for path in Path(folder).glob("checkpoint-*[0-9]")}
    return next((str(by_step[step]) for step in sorted(by_step, reverse=True) if _is_complete(by_step[step])), None)


def _is_complete(checkpoint: Path) -> bool:
    try:
        json.loads((checkpoint / STATE_FILE).read_bytes())
    except (FileNotFoundError, ValueError):
        return False
    return True


def _saved(state: TrainerState) -> dict[str, Any]:
    saved: Any = state.stateful_callbacks
    if not saved or StepwellCallback.__name__ not in saved:
        raise BadRequest(
            "the checkpoint does not say what was trained of the pool's groups: it was written without StepwellCallback"
        )
    groups: dict[str, Any] = saved[StepwellCallback.__name__]["attributes"][GROUPS]
    return groups


def install() -> None:
    """Makes TRL's class compute with missing log-probabilities. Nothing changes for batches that have all."""
    module = sys.modules.get(TRAINER_MODULE)
    if module is None or hasattr(module.AsyncGRPOTrainer, MARK):
        return
    compute = module.AsyncGRPOTrainer.compute_loss

    @wraps(compute)
    def compute_loss(self: Any, model: "torch.nn.Module", inputs: Any, *args: Any, **options: Any) -> Any:
        if not all(name in inputs for name in USED):
            raise BadRequest(f"this TRL's micro-batches have no {' and '.join(USED)}; those of trl 1.16.0 have")
        if not inputs["old_log_probs"].isnan().any():
            return compute(self, model, inputs, *args, **options)
        known, places = known_logprobs(inputs)
        hook = model.register_forward_hook(lambda _model, _given, output: _start_from_0(output, places))
        try:
            return compute(self, model, {**inputs, "old_log_probs": known}, *args, **options)
        finally:
            hook.remove()

    module.AsyncGRPOTrainer.compute_loss = compute_loss
    setattr(module.AsyncGRPOTrainer, MARK, True)


def known_logprobs(inputs: "Mapping[str, torch.Tensor]") -> "tuple[torch.Tensor, torch.Tensor]":
    """The old log-probabilities, 0 for those that nobody knows, and the places of these in the model's output.

    Samples of a group that begin with the same tokens share their places. One that was recorded tells the old
    log-probability of the others at the same place: it is the same token after the same tokens.
    """
    import torch

    old, places = inputs["old_log_probs"].clone(), inputs["token_index"]
    is_missing = old.isnan() & (places >= 0)
    is_recorded = ~old.isnan() & (places >= 0)
    told = torch.full((int(places.max()) + 1,), torch.nan, dtype=old.dtype, device=old.device)
    told[places[is_recorded]] = old[is_recorded]
    old[is_missing] = told[places[is_missing]]
    is_missing = old.isnan()
    return old.nan_to_num(nan=0.0), places[is_missing]


def _start_from_0(output: Any, places: "torch.Tensor") -> None:
    flat = output.log_probs.flatten()
    is_free = flat.new_zeros(len(flat), dtype=bool)
    is_free[places] = True
    output.log_probs = (flat - flat.detach()).where(is_free, flat).view_as(output.log_probs)
