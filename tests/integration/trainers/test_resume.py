"""Faults of other systems at a resume, replayed with our trainer and with TRL's loop. Each run has trained a part of
its groups when it dies, and must have trained all once in the end."""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import pytest
import torch

from stepwell.trainers.settings import Settings
from stepwell.trainers.trainer import AsyncTrainer
from stepwell.trainers.trl import StepwellRolloutWorker
from tests.unit.trainers.models import one_turn
from tests.unit.trainers.training_pool import TrainingPool
from tests.unit.trainers.trl_loop import TrlLoop

GROUPS, ROLLOUTS = 8, 2
LEASE = 600.0
VERSION, MAX_STALENESS = 10, 4


class Run(Protocol):
    """A trainer of one group an update, which saves a checkpoint after every other one."""

    pool: TrainingPool

    def update(self, times: int) -> None: ...

    def die(self) -> None:
        """All that is not in a checkpoint is lost."""

    def resume(self) -> None:
        """Or begin, if there is no checkpoint."""

    def counts(self) -> list[int]:
        """How often each rollout is in the weights, by its first token."""


class Counting(torch.nn.Module):
    counts: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(GROUPS * ROLLOUTS, GROUPS * ROLLOUTS)
        self.register_buffer("counts", torch.zeros(GROUPS * ROLLOUTS))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        self.counts.index_add_(0, input_ids[:, 0], torch.ones(len(input_ids)))
        return SimpleNamespace(logits=self.table(input_ids))


class OurRun:
    """The pool drops stale groups."""

    def __init__(self, folder: Path) -> None:
        self.pool = TrainingPool(max_staleness=MAX_STALENESS, on_stale="drop")
        self._folder = folder

    def resume(self) -> None:
        settings = Settings(groups=1, checkpoint_every=2, lease=LEASE, fetch_timeout=1.0)
        self._trainer = AsyncTrainer(self.pool, Counting(), settings=settings, checkpoints=self._folder)
        self._trainer.start()

    def update(self, times: int) -> None:
        for _ in range(times):
            self._trainer.step()

    def die(self) -> None:
        del self._trainer

    def counts(self) -> list[int]:
        counted: list[int] = self._trainer.model.state_dict()["counts"].int().tolist()
        return counted


class TrlRun:
    """TRL drops stale groups, and collates a micro-batch ahead of the one that it trains."""

    def __init__(self, folder: Path) -> None:
        self.pool = TrainingPool()
        self._saved: str | None = None
        self._saved_counts: Counter[int] = Counter()

    def resume(self) -> None:
        worker = StepwellRolloutWorker(self.pool, lease=LEASE, samples_ahead=ROLLOUTS)
        self._loop = TrlLoop(worker, resume=self._saved, max_staleness=MAX_STALENESS)
        self._counts, self._updates, self._ahead = self._saved_counts.copy(), 0, 0

    def update(self, times: int) -> None:
        for last in reversed(range(times)):
            while self._ahead < min(2, 1 + last):
                self._loop.collate(ROLLOUTS)
                self._ahead += 1
            self._loop.step()
            self._ahead -= 1
            self._counts.update(self._loop.trained[-1])
            self._updates += 1
            if self._updates % 2 == 0:
                self._saved, self._saved_counts = self._save(), self._counts.copy()

    def _save(self) -> str:
        written = self._loop.write()
        if not self.pool.dies_at_ack:
            self._loop.acknowledge()
        return written

    def die(self) -> None:
        self._loop.kill()

    def counts(self) -> list[int]:
        return [self._counts[rollout] for rollout in range(GROUPS * ROLLOUTS)]


def add_groups(pool: TrainingPool, groups: range, version: int = VERSION) -> None:
    for group in groups:
        turns = [
            [one_turn(f"{group}-{n}", f"p{group}", [ROLLOUTS * group + n, 2], [3, 4], policy_version=version)]
            for n in range(ROLLOUTS)
        ]
        pool.add_group(f"p{group}", [(turn, float(n)) for n, turn in enumerate(turns)])


@pytest.fixture(params=[OurRun, TrlRun], ids=["ours", "TRL"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Run]:
    run: Run = request.param(tmp_path)
    run.pool.set_policy_version(VERSION)
    yield run
    run.die()


ONCE = [1] * GROUPS * ROLLOUTS


def test_prompts_under_way_at_a_checkpoint_are_not_skipped_by_the_resumed_run(run: Run) -> None:
    """NVIDIA-NeMo/RL#3599: the saved position was that of what was handed out, ahead of what was trained."""
    add_groups(run.pool, range(GROUPS))
    run.resume()

    run.update(3)
    run.die()
    run.pool.advance_to(2 * LEASE)
    run.resume()
    assert sum(run.counts()) == 2 * ROLLOUTS, "what is in the checkpoint"
    run.update(GROUPS - 2)

    assert run.counts() == ONCE
    assert run.pool.held == 0


@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "after its leases ran out"])
def test_data_of_the_checkpoint_is_not_repeated_by_the_resumed_run(run: Run, is_late: bool) -> None:
    """OpenRLHF/OpenRLHF#1322: a resumed run began again with data that its weights contained. The worst moment to die
    is that between the checkpoint and the acknowledgement."""
    add_groups(run.pool, range(GROUPS))
    run.resume()

    run.update(1)
    run.pool.dies_at_ack = True
    with suppress(KeyboardInterrupt):
        run.update(1)
    run.die()
    run.pool.dies_at_ack = False
    if is_late:
        run.pool.advance_to(2 * LEASE)
    run.resume()
    if not is_late:
        run.pool.advance_to(2 * LEASE)
    run.update(GROUPS - 2)

    assert run.counts() == ONCE
    assert run.pool.held == 0


def test_a_dropped_group_does_not_move_the_place_from_which_a_run_resumes(run: Run) -> None:
    """huggingface/trl#7274: one stale group was never trained, so all groups after it were trained again."""
    add_groups(run.pool, range(2))
    add_groups(run.pool, range(2, 3), version=VERSION - MAX_STALENESS)
    run.pool.set_policy_version(VERSION + 1)
    add_groups(run.pool, range(3, GROUPS))
    run.resume()

    run.update(4)
    run.die()
    run.pool.advance_to(2 * LEASE)
    run.resume()
    run.update(GROUPS - 1 - 4)

    stale = range(2 * ROLLOUTS, 3 * ROLLOUTS)
    assert run.counts() == [0 if rollout in stale else 1 for rollout in range(GROUPS * ROLLOUTS)]
