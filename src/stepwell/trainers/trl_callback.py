"""TRL's checkpoints contain what was trained of the pool's groups: resume, and each group is trained exactly once.

    trainer = AsyncGRPOTrainer(…, rollout_worker=worker, callbacks=[StepwellCallback(worker)])
    trainer.train(resume_from_checkpoint=last_checkpoint("out"))

- The state of the groups is in `trainer_state.json`, the last file of a checkpoint: one that contains it is complete.
- Groups are acknowledged when that file is written. With `save_strategy="no"`, after each update.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from stepwell.errors import BadRequest
from stepwell.trainers.trl import StepwellRolloutWorker
from stepwell.trainers.trl_groups import SampleNumber, TrlProgress

STATE_FILE = "trainer_state.json"
GROUPS = "groups"


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
