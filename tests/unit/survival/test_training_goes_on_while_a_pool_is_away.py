"""D8: a pool that is away when a batch is acknowledged does not end training. The acknowledgement comes later."""

from pathlib import Path

from stepwell.trainers.settings import Settings
from stepwell.trainers.trainer import AsyncTrainer
from tests.unit.trainers.models import Recurrent, one_turn
from tests.unit.trainers.training_pool import TrainingPool


class LeavingPool(TrainingPool):
    """Goes away after a fetch, for longer than a call waits, and is back for the next one."""

    def __init__(self) -> None:
        super().__init__(timeout=0.05)
        self.leaves = True
        for group in range(4):
            rollouts = [([one_turn(f"{group}-{n}", f"p{group}", [1, n], [3 + n, 4])], float(n)) for n in range(2)]
            self.add_group(f"p{group}", rollouts)

    def fetch_batch(self, *args: object, **terms: object) -> object:  # type: ignore[override]
        self.local.transport.shards_away.clear()
        batch = super().fetch_batch(*args, **terms)  # type: ignore[arg-type]
        if self.leaves:
            self.local.transport.shards_away.add("data_pool")
        return batch

    def come_back(self) -> None:
        self.leaves = False
        self.local.transport.shards_away.clear()


def test_the_next_save_acknowledges_what_the_last_one_could_not(tmp_path: Path) -> None:
    pool = LeavingPool()
    trainer = AsyncTrainer(pool, Recurrent(), settings=Settings(groups=1, lease=60.0), checkpoints=tmp_path)
    trainer.step()
    trainer.step()
    assert trainer.update == 2
    pool.come_back()
    assert pool.stats().leases == 2
    trainer.step()
    assert pool.stats().leases == 0
    assert pool.stats().channels["train"].shipped.steps == 6


def test_a_resumed_run_acknowledges_what_the_last_one_could_not(tmp_path: Path) -> None:
    pool = LeavingPool()
    settings = Settings(groups=1, lease=60.0)
    AsyncTrainer(pool, Recurrent(), settings=settings, checkpoints=tmp_path).step()
    pool.come_back()
    AsyncTrainer(pool, Recurrent(), settings=settings, checkpoints=tmp_path).start()
    assert pool.stats().leases == 0
    assert pool.stats().channels["train"].shipped.steps == 2
