"""Rewards from what users say next, on real Ray: calls through a gateway, steps judged while the session goes on."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from openai import OpenAI

import stepwell
from rig.threads import in_thread
from stepwell.pool.client import PoolClient
from stepwell.pool.client.batch import Batch
from stepwell.steps.step import Step
from tests.integration.rewards.rollouts import POOL, Scored
from tests.integration.rewards.test_feedback import serving


class Chat:
    """A user who talks to the model."""

    def __init__(self, client: OpenAI) -> None:
        self._client = client
        self._messages: list[dict[str, str]] = []

    def say(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})
        reply = self._client.chat.completions.create(model="tiny", messages=self._messages)  # type: ignore[arg-type]
        self._messages.append({"role": "assistant", "content": reply.choices[0].message.content or ""})


@contextmanager
def chatting(run: stepwell.Run) -> Iterator[tuple[stepwell.TrajectoryContext, Chat]]:
    with run.trajectory() as t, OpenAI(base_url=t.base_url, api_key=t.api_key) as client:
        yield t, Chat(client)


def step_of(batch: Batch) -> Step:
    (step,) = batch.steps()
    return step


def judged(namespace: str, model: Path) -> Scored:
    scored = Scored(namespace)
    scored.work("next_state", workers=1, children=1, tokenizer_path=str(model))
    return scored


def test_a_step_is_trained_while_its_session_goes_on_as_soon_as_the_user_has_spoken_again(
    namespace: str, tiny_model: Path
) -> None:
    scored = judged(namespace, tiny_model)
    with in_thread(serving(PoolClient(POOL, namespace))) as url, chatting(stepwell.connect(url)) as (_, chat):
        chat.say("Name a colour")
        chat.say("No, I meant a dark colour")
        with scored.pool.batch(1, unit="steps", timeout=60.0) as batch:
            first = step_of(batch)
        assert (first.step_index, first.reward, first.reward_source) == (0, -1.0, "next_state")
        assert first.metadata["reward"] == {
            "rule": "correction",
            "speaker": "user",
            "text": "No, I meant a dark colour",
            "hint": "a dark colour",
        }
        chat.say("Thanks, that is it!")
        with scored.pool.batch(1, unit="steps", timeout=60.0) as batch:
            second = step_of(batch)
        assert (second.step_index, second.reward) == (1, 1.0)
        assert not second.is_last


def test_feedback_wins_over_what_is_inferred_and_what_nobody_judged_has_no_reward(
    namespace: str, tiny_model: Path
) -> None:
    scored = judged(namespace, tiny_model)
    with in_thread(serving(PoolClient(POOL, namespace))) as url:
        run = stepwell.connect(url)
        with chatting(run) as (t, chat):
            chat.say("Name a colour")
            assert run.feedback(t.trajectory_uid, t.prompt_uid, thumb="up", source="thumbs") == "counted"
            chat.say("No, I meant a dark colour")
            chat.say("Thanks, that is it!")
            chat.say("What is the capital of Norway?")
        with scored.pool.batch(1, timeout=60.0) as batch:
            steps = list(batch.steps())
    rewards = [(step.reward, step.reward_source) for step in steps]
    assert rewards == [(1.0, "thumbs"), (1.0, "next_state"), (None, ""), (None, "")]
    assert steps[2].metadata["reward"] == {"abstained": "no rule fits what was said next"}
    assert scored.scoring.abstained_steps == 1
