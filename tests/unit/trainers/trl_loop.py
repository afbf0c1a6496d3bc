"""What TRL does with a worker and a callback, without a model: it takes samples, collates them, trains, saves."""

import json
from types import SimpleNamespace

from stepwell.trainers.trl_groups import RolloutSample
from transformers import TrainerControl, TrainerState, TrainingArguments

from stepwell.trainers.trl import StepwellRolloutWorker
from stepwell.trainers.trl_callback import StepwellCallback

NAME = StepwellCallback.__name__


class TrlLoop:
    """`resume` is what `save` returned. Samples that are too stale are dropped, as TRL does it."""

    def __init__(
        self,
        worker: StepwellRolloutWorker,
        *,
        save_strategy: str = "steps",
        max_staleness: int = 4,
        resume: str | None = None,
    ) -> None:
        self.worker = worker
        self.callback = StepwellCallback(worker)
        self.trained: list[list[int]] = []
        """The tokens of the samples of each trained micro-batch."""
        self.model_version = 0
        self._collated: list[list[RolloutSample]] = []
        self._args = TrainingArguments(save_strategy=save_strategy, report_to="none", use_cpu=True)
        self._max_staleness = max_staleness
        self._control = TrainerControl()
        self.groups_trained: set[int] = set()
        self._collator = SimpleNamespace(groups_trained=self.groups_trained)
        self._state = TrainerState(stateful_callbacks=[self.callback])
        if resume is not None:
            self._state = TrainerState(**json.loads(resume))
        self._state.is_world_process_zero = True
        loader = SimpleNamespace(collate_fn=self._collator)
        self.begin(self.callback, loader)
        self.sync()
        worker.start()

    def begin(self, callback: StepwellCallback, loader: object) -> None:
        callback.on_train_begin(self._args, self._state, self._control, train_dataloader=loader)

    def sync(self) -> None:
        """New weights, whose version the pool has already."""
        self.model_version += 1
        self.worker.update_model_version(self.model_version)

    def take(self, count: int) -> list[RolloutSample]:
        taken: list[RolloutSample] = []
        while len(taken) < count:
            sample = self.worker.rollout_buffer.get(timeout=10)
            if self.model_version - sample.model_version <= self._max_staleness:
                taken.append(sample)
        return taken

    def collate(self, count: int) -> None:
        samples = self.take(count)
        self._collator.groups_trained.update(sample.group_id for sample in samples)
        self._collated.append(samples)

    def step(self) -> None:
        """Train the oldest micro-batch."""
        self.trained.append([int(sample.input_ids[0]) for sample in self._collated.pop(0)])
        self._state.global_step += 1
        self.callback.on_step_end(self._args, self._state, self._control)

    def update(self, count: int) -> None:
        self.collate(count)
        self.step()

    def write(self) -> str:
        """A checkpoint, which TRL has not told the callback of."""
        states = {NAME: self.callback.state()}
        return json.dumps({"global_step": self._state.global_step, "stateful_callbacks": states})

    def save(self) -> str:
        written = self.write()
        self.acknowledge()
        return written

    def acknowledge(self) -> None:
        """What TRL does once a checkpoint is written."""
        self.callback.on_save(self._args, self._state, self._control)

    def stop(self) -> None:
        self.worker.stop()

    def kill(self) -> None:
        """Nothing is acknowledged or given back any more."""
        self.worker._is_stopping.set()
        if self.worker._running is not None:
            self.worker._running.exception()
