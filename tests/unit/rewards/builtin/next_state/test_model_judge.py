"""A judge model for what no rule knows: its strict answers, its evidence, and what it is asked."""

import json
from typing import Any

import pytest
from stepwell.rewards.builtin.next_state_rules import Abstention, Evidence, NextState, Utterance

from rig.fake_engine import FakeEngine
from stepwell.errors import BadRequest, RewardFailed
from stepwell.pool.api.scoring import Score
from stepwell.rewards.builtin.next_state import read_judgement
from stepwell.rewards.function import as_score
from stepwell.rewards.loading import load
from stepwell.rewards.sample import Sample
from tests.unit.rewards.builtin.next_state.test_judging import conversation

SAID = "My cat walked over the keyboard"
STATE = NextState("a request", "a reply", (Utterance("user", SAID),))
TALK = conversation(("Name a colour", "Red"), ("No, I meant a dark one", "Black"), (SAID, "Aww"))


def answer(score: object, **more: object) -> str:
    return json.dumps({"score": score, **more})


def read(text: str) -> Evidence | Abstention:
    return read_judgement({"choices": [{"message": {"content": text}}]}, STATE)


async def judged(engine: FakeEngine, sample: Sample = TALK, ask: str = "unmatched", **judge: Any) -> Score:
    options: dict[str, Any] = {"judge": {"url": f"{engine.url}/v1", "model": "tiny", **judge}, "ask": ask}
    result: Any = load("next_state", options).call(sample)
    return as_score(await result, len(sample.steps))


async def test_the_judge_is_asked_only_where_no_rule_fits() -> None:
    async with FakeEngine(replies=[answer(-1, reason="it mocks the answer", hint="a serious one")]) as engine:
        score = await judged(engine)
        (seen,) = engine.requests
    assert score.step_rewards == (-1.0, -1.0, None)
    assert score.step_details[0] is not None
    assert score.step_details[0]["rule"] == "correction"
    assert score.step_details[1] == {
        "rule": "judge",
        "speaker": "user",
        "text": SAID,
        "hint": "a serious one",
        "reason": "it mocks the answer",
    }
    assert score.parts == {"correction": 1, "judge": 1, "abstained": 1}
    (message,) = seen.body["messages"]
    assert all(text in message["content"] for text in ("No, I meant a dark one", "Black", SAID))
    assert seen.body["response_format"]["json_schema"]["schema"]["properties"]["score"]["enum"] == [-1, 0, 1]


async def test_the_judge_can_take_the_place_of_the_rules() -> None:
    async with FakeEngine(replies=[answer(1), answer(1)]) as engine:
        assert (await judged(engine, ask="always")).step_rewards == (1.0, 1.0, None)


async def test_a_template_of_ones_own_is_filled_in() -> None:
    async with FakeEngine(replies=[answer(0, reason="no idea")]) as engine:
        score = await judged(engine, template="After {reply}:\n{said}\nScore?")
        assert engine.requests[0].body["messages"][0]["content"].endswith("Score?")
    assert score.step_details[1] == {"abstained": "the judge: no idea"}
    with pytest.raises(BadRequest, match="none of request, reply, said, mark"):
        await judged(engine, template="{nobody}")


async def test_an_answer_that_cannot_be_read_is_an_abstention_and_counted() -> None:
    async with FakeEngine(replies=["I would say 1"]) as engine:
        score = await judged(engine)
    assert score.step_rewards == (-1.0, None, None)
    assert score.parts == {"correction": 1, "unreadable": 1, "abstained": 1}


async def test_a_server_that_cannot_be_asked_is_a_failure_and_no_abstention() -> None:
    async with FakeEngine(replies=[answer(1)]) as engine:
        url = engine.url
    options: dict[str, Any] = {"judge": {"url": f"{url}/v1", "model": "tiny", "timeout": 0.2}}
    result: Any = load("next_state", options).call(TALK)
    with pytest.raises(RewardFailed):
        await result


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        "[1]",
        answer(2),
        answer(0.5),
        answer("1"),
        answer(True),
        answer(None),
        answer(1, verdict="good"),
        answer(1, hint=3),
        json.dumps({"reason": "no score"}),
        f"The score: {answer(1)}",
    ],
)
def test_other_answers_than_the_format_cannot_be_read(text: str) -> None:
    judged = read(text)
    assert isinstance(judged, Abstention)
    assert judged.is_unreadable


@pytest.mark.parametrize(
    "text", [answer(1), f"<think>well: {answer(-1)}</think>{answer(1)}", f"```json\n{answer(1)}\n```"]
)
def test_reasoning_and_a_fence_around_the_answer_are_allowed(text: str) -> None:
    assert read(text) == Evidence("judge", 1.0, "user", SAID)
