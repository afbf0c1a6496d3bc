"""A trainer that kills itself, as the kernel would: `dying_trainer ADDRESS NAMESPACE FOLDER PLACE UNIT`.

PLACE is where in its second update it dies: forward, save (the weights have changed, no checkpoint is written), write
(half a checkpoint is) or ack (a whole one is, and the pool does not know); `nowhere` runs to the end.
"""

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from stepwell.pool.api.leasing import HasLeases
from stepwell.pool.client import connect
from stepwell.trainers.settings import Settings
from stepwell.trainers.trainer import AsyncTrainer

GROUPS = 16
"""Each has a token of its own, which begins its prompts."""
UPDATES = 8
DIES_AFTER = 1
"""Updates of its own, before that in which it dies."""


class Counting(torch.nn.Module):
    """Counts, beside its weights, how often it was trained on each group: who resumes resumes the count."""

    counts: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(GROUPS, GROUPS)
        self.register_buffer("counts", torch.zeros(GROUPS))

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


def main() -> None:
    address, namespace, folder, place, unit = sys.argv[1:]
    torch.set_num_threads(1)
    settings = Settings(groups=2, updates=UPDATES, lease=8.0, fetch_timeout=60.0)
    if unit == "steps":
        settings = replace(settings, groups=4, unit="steps", advantage="step")
    pool = connect("data_pool", address=address, namespace=namespace)
    trainer = DyingTrainer(pool, Counting(), settings=settings, checkpoints=Path(folder), dies_at=place)
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


if __name__ == "__main__":
    main()
