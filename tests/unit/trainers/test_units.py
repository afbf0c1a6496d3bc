"""Batches of single trajectories and of single steps: what counts for them, and that each is trained once."""

from pathlib import Path
from typing import Any

import pytest
import torch

from stepwell.errors import BadRequest, NothingLearned
from stepwell.pool.api.producing import EndResult, Registration, RewardGiven, SubmitVerdict
from stepwell.trainers.loader import pool_loader
from stepwell.trainers.rows import choose_rows
from stepwell.trainers.settings import RowSettings, Settings
from stepwell.trainers.trainer import AsyncTrainer
from tests.unit.trainers.models import Recurrent, one_turn
from tests.unit.trainers.training_pool import TrainingPool

STEPS = Settings(unit="steps", advantage="step", groups=4, updates=6, learning_rate=1e-2, lease=60.0)


class LivePool(TrainingPool):
    """With sessions that nobody ends."""

    def __init__(self) -> None:
        super().__init__(require_reward=True)

    def open(self, uid: str) -> None:
        self._run(self.local.register_trajectory(Registration(uid, uid)))

    def say(self, uid: str, turn: int, answer: int, reward: float | None) -> None:
        """One more turn of a session, which continues the one before it."""
        prompt = [1, *([2, 9] * turn)]
        step = one_turn(uid, uid, prompt, [answer], step_index=turn, reward=reward)
        assert self._run(self.local.submit_steps([step])) == [SubmitVerdict.ACCEPTED]

    def end(self, uid: str, reward: float | None = None) -> None:
        assert self._run(self.local.complete_trajectory(uid, uid, reward)) is EndResult.COMPLETED


def live(sessions: int = 12, turns: int = 2) -> LivePool:
    """All sessions go on. A turn that says 3 has a reward."""
    pool = LivePool()
    for session in range(sessions):
        pool.open(f"s{session}")
        for turn in range(turns):
            answer = 3 + (session + turn) % 3
            pool.say(f"s{session}", turn, answer, float(answer == 3))
    return pool


def probability_of_3(model: torch.nn.Module) -> float:
    logits = model(input_ids=torch.tensor([[1, 2, 9]]), attention_mask=None).logits[0, -1]
    return logits.softmax(-1)[3].item()  # type: ignore[no-any-return]


def same(some: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(some.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(one, another) for one, another in pairs)


def advantages(pool: TrainingPool, count: int, **settings: Any) -> list[float]:
    """Of the steps of a batch, in its order, as they are."""
    rows = RowSettings(**{"unit": "steps", "advantage": "step", "baseline": "none"} | settings)
    chosen = choose_rows(pool.fetch_batch(count, unit=rows.unit, lease=60.0), (), rows)
    trained = chosen.advantages[chosen.merged.places]
    return [round(float(value), 4) for value in trained]


@pytest.mark.parametrize("kind", ["step", "reward_to_go"])
@pytest.mark.parametrize("baseline", ["group", "batch", "running", "none"])
def test_steps_teach_before_their_session_ends(baseline: Any, kind: Any) -> None:
    pool, model = live(), Recurrent()
    settings = Settings(
        unit="steps", advantage=kind, baseline=baseline, groups=4, updates=6, learning_rate=1e-2, lease=60.0
    )
    AsyncTrainer(pool, model, settings=settings).run()
    assert probability_of_3(model) > 1.1 * probability_of_3(Recurrent())
    assert pool.held == 0


def test_a_step_counts_with_its_own_reward_and_not_with_those_of_earlier_steps() -> None:
    pool = LivePool()
    pool.open("s")
    for turn, reward in enumerate((1.0, 0.25, -1.0)):
        pool.say("s", turn, 3, reward)
    assert advantages(pool, 3) == [1.0, 0.25, -1.0]


def test_with_reward_to_go_later_rewards_that_are_known_count_too() -> None:
    pool = LivePool()
    pool.open("s")
    for turn, reward in enumerate((1.0, None, -1.0)):
        pool.say("s", turn, 3, reward)
    assert advantages(pool, 2, advantage="reward_to_go") == [0.0, -1.0]
    pool.say("s", 3, 3, 0.5)
    assert advantages(pool, 1, advantage="reward_to_go") == [0.5]


def test_later_steps_of_the_same_session_do_not_count_twice_in_the_mean() -> None:
    pool = LivePool()
    pool.open("s")
    for turn, reward in enumerate((0.0, 0.0, 3.0)):
        pool.say("s", turn, 3, reward)
    assert advantages(pool, 3, baseline="batch", divide_by_std=False) == [-1.0, -1.0, 2.0]


def test_the_outcome_reward_counts_once_the_session_has_ended() -> None:
    pool = LivePool()
    pool.open("s")
    pool.say("s", 0, 3, 0.25)
    pool.say("s", 1, 4, None)
    assert advantages(pool, 1) == [0.25]
    pool.end("s", 1.0)
    assert advantages(pool, 1) == [1.0]


def test_a_step_is_trained_when_its_reward_comes() -> None:
    pool = LivePool()
    pool.open("s")
    pool.say("s", 0, 3, None)
    pool.say("s", 1, 3, 0.5)
    assert advantages(pool, 1) == [0.5]
    assert pool.give_reward(RewardGiven(trajectory_uid="s", prompt_uid="s", value=-0.5, step_index=0))
    assert advantages(pool, 1) == [-0.5]


def test_steps_without_a_reward_are_counted_and_the_run_says_what_to_do() -> None:
    pool = TrainingPool()
    turn = one_turn("s", "s", [1], [3])
    pool._run(pool.local.register_trajectory(Registration("s", "s")))
    pool._run(pool.local.submit_steps([turn]))
    settings = Settings(unit="steps", advantage="step", groups=1, max_unlearnable=1)
    with pytest.raises(NothingLearned, match="1 unscored rollouts.*start the pool with --require-reward"):
        AsyncTrainer(pool, Recurrent(), settings=settings).run()


def test_the_reward_of_an_update_is_that_of_its_steps() -> None:
    pool = LivePool()
    pool.open("s")
    for turn, reward in enumerate((1.0, 0.0, 0.5)):
        pool.say("s", turn, 3, reward)
    settings = Settings(unit="steps", advantage="step", groups=3)
    metrics = AsyncTrainer(pool, Recurrent(), settings=settings).step()
    assert (metrics.reward, metrics.rollouts) == (0.5, 3)


def test_the_return_of_a_rollout_that_goes_on_is_no_advantage() -> None:
    with pytest.raises(BadRequest, match="with unit='steps', advantage is step or reward_to_go"):
        Settings(unit="steps")


@pytest.mark.parametrize("seconds", [1.0, 1000.0], ids=["the lease holds", "the lease ran out"])
def test_a_step_is_trained_once_by_whoever_resumes_and_the_next_of_its_session_too(
    tmp_path: Path, seconds: float
) -> None:
    """The first batch has the first turns of four sessions, the second their second turns."""

    def talk() -> LivePool:
        pool = LivePool()
        for session in range(4):
            pool.open(f"s{session}")
        for turn in range(2):
            for session in range(4):
                pool.say(f"s{session}", turn, 3 + session % 2, float(session % 2))
        return pool

    pool = talk()
    pool.dies_at_ack = True
    with pytest.raises(KeyboardInterrupt):
        AsyncTrainer(pool, Recurrent(), settings=STEPS, checkpoints=tmp_path).step()
    pool.dies_at_ack = False
    pool.advance_to(seconds)
    resumed = AsyncTrainer(pool, Recurrent(seed=5), settings=STEPS, checkpoints=tmp_path)
    seen = resumed.step()
    assert (resumed.update, seen.rollouts_trained) == (2, 4)
    assert pool.held == 0
    through = AsyncTrainer(talk(), Recurrent(), settings=STEPS)
    through.run(2)
    assert same(through.model, resumed.model)


def test_trajectories_are_trained_though_their_group_is_not_complete() -> None:
    pool, model = TrainingPool(), Recurrent()
    for number in range(8):
        uid, answer = f"t{number}", 3 + number % 2
        pool._run(pool.local.register_trajectory(Registration(uid, "p", group_size=100)))
        steps = [one_turn(uid, "p", prompt, [answer], step_index=n) for n, prompt in enumerate(([1], [1, 2, 9]))]
        pool._run(pool.local.submit_steps(steps))
        pool._run(pool.local.complete_trajectory(uid, "p", float(answer == 3)))
    settings = Settings(unit="trajectories", groups=4, updates=2, learning_rate=1e-2)
    trainer = AsyncTrainer(pool, model, settings=settings)
    metrics = [trainer.step(), trainer.step()]
    assert [update.rollouts_trained for update in metrics] == [4, 4]
    assert probability_of_3(model) > probability_of_3(Recurrent())


def test_a_loader_gives_steps_too() -> None:
    """Of four steps one has a reward other than 0."""
    rows = RowSettings(unit="steps", advantage="step", baseline="none")
    (batch,) = pool_loader(live(2, 2), 4, batches=1, rows=rows)
    assert batch["advantages"][batch["trained"]].tolist() == [1.0]
