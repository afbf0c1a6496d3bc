"""T4: live traffic has no others of its prompt, and still teaches: groups of one have a fallback baseline.

A session was recorded exactly, had the advantage 0, and was acknowledged.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rig.waiting import wait_until
from stepwell.errors import NothingLearned
from stepwell.trainers.loader import pool_loader
from stepwell.trainers.rows import choose_rows
from stepwell.trainers.settings import RowSettings, Settings
from stepwell.trainers.trainer import FILE, AsyncTrainer, read_checkpoint
from stepwell.trainers.trl import StepwellRolloutWorker
from tests.unit.trainers.models import Recurrent, one_turn
from tests.unit.trainers.training_pool import TrainingPool

LIVE: dict[str, Any] = {"groups": 4, "updates": 6, "learning_rate": 1e-2}


def sessions(count: int, **step: Any) -> TrainingPool:
    """Sessions without a prompt in common, of which those earn something that say 3."""
    pool = TrainingPool()
    for number in range(count):
        answer = 3 + number % 3
        turn = one_turn(f"s{number}", f"s{number}", [number % 5, 1], [answer, 6], **step)
        pool.add_group(f"s{number}", [([turn], float(answer == 3))])
    return pool


def probability_of_3(model: torch.nn.Module) -> float:
    logits = model(input_ids=torch.tensor([[0, 1]]), attention_mask=None).logits[0, -1]
    return logits.softmax(-1)[3].item()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "settings",
    [
        Settings(**LIVE),
        Settings(**LIVE, baseline="leave_one_out"),
        Settings(**LIVE, fallback_baseline="batch"),
        Settings(**LIVE, baseline="batch", divide_by_std=False),
        Settings(**LIVE, baseline="running"),
        Settings(**LIVE, baseline="none"),
    ],
    ids=["fallback", "leave one out", "fallback batch", "batch", "running", "none"],
)
def test_a_trainer_learns_from_sessions_without_siblings(settings: Settings) -> None:
    pool, model = sessions(24), Recurrent()
    trainer = AsyncTrainer(pool, model, settings=settings)
    metrics = [trainer.step() for _ in range(6)]
    assert probability_of_3(model) > 1.1 * probability_of_3(Recurrent())
    assert [update.groups_single for update in metrics] == [0] * 6


@pytest.mark.parametrize("fallback", ["none", "group"])
def test_with_baseline_group_alone_they_teach_nothing_and_the_run_says_so(fallback: Any) -> None:
    settings = Settings(**LIVE, fallback_baseline=fallback, max_unlearnable=2)
    told = "8 groups of one .* baseline group .* To do: set fallback_baseline to running"
    with pytest.raises(NothingLearned, match=told):
        AsyncTrainer(sessions(24), Recurrent(), settings=settings).run()


def test_sessions_one_by_one_teach_by_what_was_before() -> None:
    """The first has nothing to be compared with, and that is no lack of siblings."""
    trainer = AsyncTrainer(sessions(3), Recurrent(), settings=Settings(groups=1))
    first, second, _ = (trainer.step() for _ in range(3))
    assert (first.tokens, first.groups_single, first.groups_equal) == (0, 0, 1)
    assert second.gradient_norm > 0


def test_tasks_named_in_the_metadata_have_means_of_their_own() -> None:
    """Under one mean, an easy task done badly would look better than a hard task done well."""
    pool = TrainingPool()
    rewards = {"easy": (10.0, 8.0), "hard": (2.0, 0.0)}
    for task, given in rewards.items():
        for n, reward in enumerate(given):
            turn = one_turn(f"{task}{n}", f"{task}{n}", [1], [2], metadata={"task": task})
            pool.add_group(f"{task}{n}", [([turn], reward)])
    past = choose_rows(pool.fetch_batch(4), (), RowSettings(baseline_key="task")).statistics
    easy, hard = past.find("easy"), past.find("hard")
    assert easy is not None
    assert hard is not None
    assert (easy.common, hard.common) == pytest.approx((9.0, 1.0))


def test_a_loader_keeps_the_statistics_of_its_batches() -> None:
    batches = list(pool_loader(sessions(6), 1, batches=2))
    assert [set(batch["advantages"][batch["trained"]].sign().tolist()) for batch in batches] == [{-1.0}, {-1.0}]


def test_trl_gets_sessions_too() -> None:
    worker = StepwellRolloutWorker(sessions(4))
    worker.resume(None)
    worker.start()
    wait_until(lambda: worker.rollout_buffer.qsize() >= 2, "samples of sessions")
    assert worker.rollout_buffer.get().advantage < 0
    worker.stop()


# -- the statistics are part of a checkpoint ---------------------------------------------------------------------------


def weights(model: torch.nn.Module) -> Sequence[torch.Tensor]:
    return [value.clone() for value in model.state_dict().values()]


@pytest.mark.parametrize("baseline", ["group", "running"])
def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(tmp_path: Path, baseline: Any) -> None:
    settings = Settings(**LIVE, baseline=baseline)
    through = AsyncTrainer(sessions(24), Recurrent(), settings=settings)
    through.run()
    broken = sessions(24)
    AsyncTrainer(broken, Recurrent(), settings=settings, checkpoints=tmp_path).run(3)
    resumed = AsyncTrainer(broken, Recurrent(seed=9), settings=settings, checkpoints=tmp_path)
    resumed.run()
    assert all(torch.equal(a, b) for a, b in zip(weights(through.model), weights(resumed.model), strict=True))


@pytest.mark.parametrize("seconds", [1.0, 1000.0], ids=["the lease holds", "the lease ran out"])
def test_a_batch_that_comes_back_counts_once_in_the_statistics(tmp_path: Path, seconds: float) -> None:
    pool, settings = sessions(8), Settings(**LIVE, lease=60.0)
    pool.dies_at_ack = True
    with pytest.raises(KeyboardInterrupt):
        AsyncTrainer(pool, Recurrent(), settings=settings, checkpoints=tmp_path).step()
    pool.dies_at_ack = False
    pool.advance_to(seconds)
    AsyncTrainer(pool, Recurrent(), settings=settings, checkpoints=tmp_path).step()
    through, whole = (
        AsyncTrainer(sessions(8), Recurrent(), settings=settings, checkpoints=tmp_path / "through"),
        tmp_path,
    )
    through.run(2)
    resumed, uninterrupted = read_checkpoint(whole), read_checkpoint(tmp_path / "through")
    assert resumed is not None
    assert uninterrupted is not None
    assert resumed.statistics == uninterrupted.statistics != {}


def test_a_checkpoint_from_before_there_were_statistics_is_read(tmp_path: Path) -> None:
    pool = sessions(8)
    AsyncTrainer(pool, Recurrent(), settings=Settings(**LIVE), checkpoints=tmp_path).step()
    values = torch.load(tmp_path / FILE, weights_only=True)
    del values["statistics"]
    torch.save(values, tmp_path / FILE)
    resumed = AsyncTrainer(pool, Recurrent(), settings=Settings(**LIVE), checkpoints=tmp_path)
    resumed.start()
    assert resumed.update == 1
