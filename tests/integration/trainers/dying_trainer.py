"""A trainer that is killed and lives again: `dying_trainer ADDRESS NAMESPACE FOLDER UNIT UPDATES`.

It reads from stdin how it is to die next, and writes the exit code of each life to stdout:
- a place in its second update, where it kills itself: forward, save (the weights have changed, no checkpoint is
  written), write (half a checkpoint is) or ack (a whole one is, and the pool does not know)
- `random SEED TIMES`: it is killed so many times, at random moments
- `nowhere`: it runs to the end
"""

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rig.trainers.lives import Lives
from stepwell.pool.api.leasing import HasLeases
from stepwell.pool.client import connect
from stepwell.trainers.settings import Settings
from stepwell.trainers.trainer import AsyncTrainer

GROUPS_PER_UPDATE = 2
"""Each group has a token of its own, which begins its prompts."""
DIES_AFTER = 1
"""Updates of its own, before that in which it dies."""


class Counting(torch.nn.Module):
    """Counts, beside its weights, how often it was trained on each group: who resumes resumes the count."""

    counts: torch.Tensor

    def __init__(self, groups: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(groups, groups)
        self.register_buffer("counts", torch.zeros(groups))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        self.counts.index_add_(0, input_ids[:, 0], torch.ones(len(input_ids)))
        return SimpleNamespace(logits=self.table(input_ids))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DyingTrainer(AsyncTrainer):
    dies_at: str

    def __init__(self, *args: Any, dies_at: str, **named: Any) -> None:
        super().__init__(*args, **named)
        self.dies_at = dies_at
        self.model.register_forward_hook(lambda *_: self._passes("forward"))

    def run(self, updates: int | None = None) -> None:
        self.start()
        self._dying_update = self.update + DIES_AFTER + 1
        super().run(updates)

    def _passes(self, place: str) -> None:
        under_way = self.update + (place == "forward")
        if place == self.dies_at and under_way == getattr(self, "_dying_update", None):
            die()

    def _save(self) -> None:
        self._passes("save")
        super()._save()


@dataclass(frozen=True, slots=True)
class Run:
    address: str
    namespace: str
    folder: Path
    unit: str
    updates: int

    def live(self, dies_at: str, passes: Callable[[], None]) -> None:
        torch.set_num_threads(1)
        settings = Settings(groups=GROUPS_PER_UPDATE, updates=self.updates, lease=8.0, fetch_timeout=60.0)
        if self.unit == "steps":
            settings = replace(settings, groups=2 * GROUPS_PER_UPDATE, unit="steps", advantage="step")
        pool = connect("data_pool", address=self.address, namespace=self.namespace)
        model = Counting(GROUPS_PER_UPDATE * self.updates)
        model.register_forward_pre_hook(lambda *_: passes())
        trainer = DyingTrainer(pool, model, settings=settings, checkpoints=self.folder, dies_at=dies_at)
        replace_file, acknowledge = os.replace, pool.ack

        def replace_or_die(source: Any, target: Any) -> None:
            trainer._passes("write")
            replace_file(source, target)

        def acknowledge_or_die(leased: HasLeases) -> None:
            trainer._passes("ack")
            acknowledge(leased)

        os.replace = replace_or_die  # type: ignore[assignment]
        pool.ack = acknowledge_or_die  # type: ignore[method-assign]
        trainer.run()


def main() -> None:
    address, namespace, folder, unit, updates = sys.argv[1:]
    run = Run(address, namespace, Path(folder), unit, int(updates))
    for line in sys.stdin:
        how, *numbers = line.split()
        if how == "random":
            seed, times = map(int, numbers)
            Lives(partial(run.live, "nowhere"), seed).kill(times)
            code = -signal.SIGKILL
        else:
            code = Lives(partial(run.live, how), seed=0).run()
        sys.stdout.write(f"{code}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
