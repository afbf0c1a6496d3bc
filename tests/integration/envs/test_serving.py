"""An environment in the service of a trainer, over real HTTP."""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rig.rollout_server import FakeRolloutServer
from rig.waiting import until
from stepwell.envs.config import EvalHandling
from stepwell.envs.loop import lifecycle
from stepwell.envs.loop.progress import EnvProgress
from stepwell.envs.tracking import FailureCount
from stepwell.errors import BadRequest, EnvironmentFailed, RolloutServerRefused
from tests.integration.envs.counting import CountingEnv, counting, rollout


class Shown:
    def __init__(self) -> None:
        self.progress: list[EnvProgress] = []

    def update(self, progress: EnvProgress) -> None:
        self.progress.append(progress)

    @property
    def last(self) -> EnvProgress:
        return self.progress[-1]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@contextlib.asynccontextmanager
async def serving(env: CountingEnv) -> AsyncIterator[tuple["asyncio.Task[None]", Shown]]:
    """The environment at work, stopped well in the end."""
    shown = Shown()
    task = asyncio.create_task(lifecycle.serve(env, shown))
    try:
        yield task, shown
        if not task.done():
            os.kill(os.getpid(), signal.SIGTERM)
            env.may_finish.set()
            env.may_end_evaluation.set()
            await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def server(**trainer: Any) -> AsyncIterator[FakeRolloutServer]:
    async with FakeRolloutServer(**trainer).opened() as opened:
        yield opened


async def test_groups_arrive_whole_and_the_queue_keeps_to_the_off_policy_limit() -> None:
    async with server(batch_size=8) as rollouts:
        env = counting(rollouts.url, max_batches_offpolicy=3)
        async with serving(env) as (_, shown):
            await until(lambda: shown.progress != [] and shown.last.idle != "", "a pause")
            assert shown.last.idle == "enough waits for the trainer"
            assert len(rollouts.queue) == 6  # 3 batches of 8 in groups of 4
            rollouts.train(2)
            await until(lambda: len(rollouts.taken) == 10, "what was taken to be made up for")
        assert rollouts.most_waiting == 6
        group = rollouts.taken[0]
        assert group["tokens"] == [[0, 1, 2]] * 4
        assert group["inference_logprobs"] == [[1.0, -0.5, -0.25]] * 4
        assert group["policy_versions"] == [3] * 4
        assert rollouts.disconnected == [0]


async def test_a_pause_lets_work_under_way_finish_and_be_sent() -> None:
    async with server(batch_size=8) as rollouts:
        env = counting(rollouts.url, max_batches_offpolicy=1)
        env.may_finish.clear()
        async with serving(env) as (_, shown):
            await until(lambda: len(env.begun) == 2, "work under way")
            rollouts.queue += [{"tokens": [[1]] * 4, "env_id": 7}] * 2  # another environment fills the queue
            await until(lambda: shown.last.idle == "enough waits for the trainer", "the pause")
            env.may_finish.set()
            await until(lambda: len(rollouts.taken) == 2, "what was under way")
        assert sorted(group["tokens"][0][0] for group in rollouts.taken) == sorted(env.begun[:2])


async def test_a_group_whose_answer_was_lost_is_sent_again_under_the_same_name() -> None:
    async with server() as rollouts:
        rollouts.loses_answers = 1
        env = counting(rollouts.url)
        env.last_item = 0
        async with serving(env) as (task, shown):
            await task
        assert len(rollouts.taken) == 1
        assert len(rollouts.posts) == 2
        assert len(set(rollouts.posts)) == 1
        assert shown.last.delivered == 1


async def test_nothing_is_lost_while_the_rollout_server_is_away() -> None:
    async with server() as rollouts:
        env = counting(rollouts.url)
        env.last_item = 1
        env.may_finish.clear()
        async with serving(env) as (task, shown):
            await until(lambda: len(env.begun) == 2, "work under way")
            rollouts.is_away = True
            env.may_finish.set()
            await until(lambda: shown.last.idle == "the rollout server is away", "the loss to be seen")
            rollouts.is_away = False
            await task
        assert sorted(group["tokens"][0][0] for group in rollouts.taken) == [0, 1]


async def test_a_rollout_server_that_forgot_the_environment_is_joined_again() -> None:
    async with server() as rollouts:
        env = counting(rollouts.url, max_batches_offpolicy=1)
        async with serving(env):
            await until(lambda: len(rollouts.taken) == 2, "work to be sent")
            rollouts.forget()
            await until(lambda: len(rollouts.envs) == 1, "a second registration")


async def test_what_is_refused_is_counted_and_kept(tmp_path: Path) -> None:
    async with server() as rollouts:
        rollouts.refuses = True
        env = counting(rollouts.url)
        env.last_item = 0
        async with serving(env) as (task, shown):
            await task
        assert shown.last.dropped == {"not sent": 1}
        assert '"tokens":[[0,1,2]' in (tmp_path / "unsent.jsonl").read_text()


async def test_groups_that_teach_nothing_are_dropped_and_counted_by_cause() -> None:
    class Unfit(CountingEnv):
        async def postprocess_histories(self, trajectories: Any) -> Any:
            item = trajectories["tokens"][0][0]
            if item == 0:
                trajectories["scores"] = [1.0] * 4
            if item == 1:
                return {key: values[:3] for key, values in trajectories.items()}
            if item == 2:
                trajectories["tokens"][0] = trajectories["masks"][0] = [5] * 65
                trajectories["inference_logprobs"][0] = [-1.0] * 65
            if item == 3:
                trajectories["scores"][0] = float("nan")
            return None if item == 4 else trajectories

    async with server(max_token_len=64) as rollouts:
        env = Unfit(counting(rollouts.url).config)
        env.last_item = 5
        async with serving(env) as (task, shown):
            await task
        assert shown.last.dropped == {
            "equal scores": 1,
            "wrong size": 1,
            "too long": 1,
            "malformed": 1,
            "nothing collected": 1,
        }
        assert [group["tokens"][0][0] for group in rollouts.taken] == [5]


async def test_a_hung_worker_is_ended_and_counted_and_others_go_on() -> None:
    class Hanging(CountingEnv):
        async def collect_trajectory(self, item: Any) -> Any:
            if item == 0:
                await asyncio.Event().wait()
            return await super().collect_trajectory(item)

    async with server() as rollouts:
        env = Hanging(counting(rollouts.url, worker_timeout=0.3).config)
        env.last_item = 1
        async with serving(env) as (task, shown):
            await task
        assert shown.last.dropped == {"timed out": 1}
        assert [group["tokens"][0][0] for group in rollouts.taken] == [1]
        assert env.cleanups == 2


async def test_an_evaluation_stops_the_start_of_work_and_not_work_under_way() -> None:
    async with server(batch_size=4) as rollouts:
        env = counting(rollouts.url, steps_per_eval=2, max_num_workers=1, max_batches_offpolicy=2)
        async with serving(env) as (_, shown):
            await until(lambda: len(rollouts.queue) == 2, "batches")
            env.may_finish.clear()
            env.may_end_evaluation.clear()
            rollouts.train(1)
            await until(lambda: len(env.begun) == 3, "work under way")
            rollouts.train(1)
            await until(lambda: env.evaluations == 1, "the evaluation at step 2")
            env.may_finish.set()
            await until(lambda: len(rollouts.taken) == 3, "work under way to be sent")
            await until(lambda: shown.last.running == 0 and shown.last.idle == "evaluating", "the pause")
            assert len(env.begun) == 3
            env.may_end_evaluation.set()
            await until(lambda: len(env.begun) > 3, "work to go on")


async def test_training_goes_on_during_an_evaluation_if_it_may() -> None:
    async with server(batch_size=4) as rollouts:
        env = counting(rollouts.url, steps_per_eval=1, eval_handling=EvalHandling.NONE)
        env.may_end_evaluation.clear()
        async with serving(env) as (_, shown):
            await until(rollouts.has_batch, "a batch")
            rollouts.train(1)
            await until(lambda: shown.last.is_evaluating, "the evaluation")
            begun = len(env.begun)
            rollouts.train(1)
            await until(lambda: len(env.begun) > begun, "work during the evaluation")


async def test_the_work_ends_when_there_are_no_more_items_and_the_backlog_is_done() -> None:
    class WithFollowUps(CountingEnv):
        async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
            group, _ = await super().collect_trajectories(item)
            return group, [item + 10] if item < 10 else []

    async with server() as rollouts:
        env = WithFollowUps(counting(rollouts.url).config)
        env.last_item = 1
        async with serving(env) as (task, _):
            await task
        assert sorted(group["tokens"][0][0] for group in rollouts.taken) == [0, 1, 10, 11]
        assert rollouts.disconnected == [0]


async def test_the_work_ends_with_the_trainer() -> None:
    async with server(num_steps=2, batch_size=4) as rollouts:
        env = counting(rollouts.url, total_steps=-1)
        async with serving(env) as (task, shown):
            await until(lambda: len(rollouts.queue) >= 2, "two batches")
            rollouts.train(2)
            await task
        assert shown.last.done == shown.last.total == 2


async def test_a_failure_is_recorded_once_with_its_traceback_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(CountingEnv):
        async def collect_trajectories(self, item: Any) -> Any:
            if item < 3:
                raise ValueError(f"no good: {item}")
            return await super().collect_trajectories(item)

    async with server() as rollouts:
        env = Failing(counting(rollouts.url).config)
        env.last_item = 3
        with caplog.at_level(logging.ERROR, "stepwell.envs"):
            async with serving(env) as (task, shown):
                await task
        assert shown.last.dropped == {"collect_trajectories": 3}
        assert [group["tokens"][0][0] for group in rollouts.taken] == [3]
        records = [record for record in caplog.records if record.exc_info]
        assert len(records) == 1
        assert "ValueError: no good" in records[0].getMessage()


async def test_a_group_whose_postprocessing_failed_is_not_sent() -> None:
    class Failing(CountingEnv):
        async def postprocess_histories(self, trajectories: Any) -> Any:
            raise ValueError("no good")

    async with server() as rollouts:
        env = Failing(counting(rollouts.url).config)
        env.last_item = 0
        async with serving(env) as (task, shown):
            await task
        assert shown.last.dropped == {"postprocess_histories": 1}
        assert rollouts.taken == []


async def test_failures_of_evaluations_and_checkpoints_do_not_end_the_work(tmp_path: Path) -> None:
    class Failing(CountingEnv):
        async def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            raise ValueError("no evaluation")

        def save_checkpoint(self, step: int, data: Any = None) -> None:
            raise ValueError("no checkpoint")

    async with server(batch_size=4, save_checkpoint_interval=1) as rollouts:
        env = Failing(counting(rollouts.url, steps_per_eval=1).config)
        async with serving(env) as (_, shown):
            await until(rollouts.has_batch, "a batch")
            rollouts.train(1)
            await until(lambda: {"evaluate", "save_checkpoint"} <= set(shown.last.dropped), "both failures")
            sent = len(rollouts.taken)
            rollouts.train(1)
            await until(lambda: len(rollouts.taken) > sent, "the work to go on")


async def test_an_environment_that_fails_again_and_again_says_why_it_stops() -> None:
    class Broken(CountingEnv):
        async def collect_trajectory(self, item: Any) -> Any:
            raise ValueError("no such dataset")

    async with server() as rollouts:
        env = Broken(counting(rollouts.url).config)
        env.failure_count = FailureCount(3, first_pause=0.01)
        async with serving(env) as (task, shown):
            with pytest.raises(EnvironmentFailed, match="3 failures in a row.*ValueError: no such dataset"):
                await task
        assert rollouts.disconnected == [0]
        assert shown.last.dropped["collect_trajectories"] >= 3


async def test_a_rollout_that_failed_is_tried_again_and_the_others_are_kept() -> None:
    class Flaky(CountingEnv):
        calls = 0

        async def collect_trajectory(self, item: Any) -> Any:
            self.calls += 1
            if self.calls == 1:
                raise ValueError("a bad moment")
            return (None, []) if self.calls == 2 else (rollout(self.calls, score=self.next_score()), [])

    async with server() as rollouts:
        env = Flaky(counting(rollouts.url).config)
        env.last_item = 0
        async with serving(env) as (task, _):
            await task
        assert [tokens[0] for tokens in rollouts.taken[0]["tokens"]] == [3, 4, 5, 6]
        assert env.calls == 6


async def test_checkpoints_are_written_at_the_servers_interval_and_keep_what_is_under_way(tmp_path: Path) -> None:
    async with server(batch_size=4, save_checkpoint_interval=2, checkpoint_dir=tmp_path) as rollouts:
        env = counting(rollouts.url, wandb_name="counting", max_num_workers=1)
        async with serving(env):
            await until(lambda: len(rollouts.queue) == 3 and not env.items_in_progress, "the queue to be full")
            env.may_finish.clear()
            rollouts.train(1)
            await until(lambda: len(env.items_in_progress) == 1, "work under way")
            [item] = env.items_in_progress.values()
            rollouts.train(1)
            folder = tmp_path / "env_checkpoints" / "counting_0"
            await until((folder / "step-2.json").exists, "the checkpoint")
            assert not (folder / "step-1.json").exists()
            other = counting()
            other.checkpoints, other.curr_step = env.checkpoints, 3
            other.load_checkpoint()
            assert other.position == env.position == item + 1
            assert other.backlog == [item]


async def test_registration_waits_for_the_trainer_and_can_be_given_up() -> None:
    async with server() as rollouts:
        rollouts.has_trainer = False
        async with serving(counting(rollouts.url)) as (task, _):
            await until(lambda: rollouts.registrations > 0, "an attempt")
            os.kill(os.getpid(), signal.SIGTERM)
            await task
        assert rollouts.envs == []


async def test_a_second_signal_does_not_wait_for_work_under_way(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "stepwell.envs")
    async with server() as rollouts:
        env = counting(rollouts.url)
        env.may_finish.clear()
        async with serving(env) as (task, _):
            await until(lambda: len(env.begun) == 2, "work under way")
            os.kill(os.getpid(), signal.SIGINT)
            await until(lambda: "a second signal stops at once" in caplog.text, "the first signal to be seen")
            assert not task.done()
            os.kill(os.getpid(), signal.SIGINT)
            await task
        assert rollouts.taken == []
        assert sorted(env.backlog) == [0, 1]


async def test_a_group_that_fits_into_no_batch_is_refused_before_any_work() -> None:
    async with server(batch_size=2) as rollouts:
        with pytest.raises(BadRequest, match="a group of 4 does not fit into the trainer's batch of 2"):
            await lifecycle.serve(counting(rollouts.url))


async def test_the_share_kept_for_an_environment_is_filled_though_others_fill_the_queue() -> None:
    async with server(batch_size=8) as rollouts:
        rollouts.unallocated_fraction = 0.5
        rollouts.queue += [{"tokens": [[1]] * 4, "env_id": 7}] * 6
        env = counting(rollouts.url, min_batch_allocation=0.5, max_batches_offpolicy=3)
        async with serving(env) as (_, shown):
            await until(lambda: len(rollouts.taken) == 3, "its share of three batches")
            await until(lambda: shown.last.idle != "" and shown.last.running == 0, "the pause")
        assert len(rollouts.taken) == 3


async def test_a_server_that_is_none_is_told_apart(tmp_path: Path) -> None:
    async with server() as rollouts:
        with pytest.raises(RolloutServerRefused, match="404"):
            await lifecycle.serve(counting(rollouts.url + "/elsewhere"))
