import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion

from stepwell.demo.tasks import HELD_OUT, TASKS, calculated, shown, split


class ScriptedClient:
    """An OpenAI client that answers with what it was given, and keeps what it was asked."""

    def __init__(self, *answers: Mapping[str, Any]) -> None:
        self.answers = list(answers)
        self.asked: list[dict[str, Any]] = []

    @property
    def chat(self) -> "ScriptedClient":
        return self

    @property
    def completions(self) -> "ScriptedClient":
        return self

    async def create(self, **asked: Any) -> ChatCompletion:
        self.asked.append({**asked, "messages": list(asked["messages"])})
        message = {"role": "assistant", **self.answers.pop(0)}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return ChatCompletion.model_validate(
            {"id": "c", "object": "chat.completion", "created": 0, "model": "demo", "choices": [choice]}
        )


def call(arguments: str) -> Mapping[str, Any]:
    called = {"id": "call-1", "type": "function", "function": {"name": "calc", "arguments": arguments}}
    return {"content": None, "tool_calls": [called]}


async def play(name: str, sample: Mapping[str, str], *answers: Mapping[str, Any]) -> tuple[float, ScriptedClient]:
    client: Any = ScriptedClient(*answers)
    assert not isinstance(client, AsyncOpenAI)
    return await TASKS[name].play(client, sample), client


@pytest.mark.parametrize("name", TASKS)
def test_held_out_samples_are_neither_trained_nor_shown(name: str) -> None:
    samples, held_out = split(TASKS[name], 3)
    texts = [turns[0].text for turns, _ in zip(shown(TASKS[name], samples, 3), range(500), strict=False)]

    assert len(held_out) == HELD_OUT
    assert len(samples) + len(held_out) == len(TASKS[name].samples())
    assert not [sample for sample in held_out if sample in samples]
    assert not {next(iter(sample.values())) for sample in held_out} & set(texts)


@pytest.mark.parametrize("name", TASKS)
def test_a_seed_decides_the_split(name: str) -> None:
    assert split(TASKS[name], 1) == split(TASKS[name], 1)
    assert split(TASKS[name], 1) != split(TASKS[name], 2)


def test_wrong_words_in_the_warm_up_have_the_right_letters() -> None:
    answers = [TASKS["rev"].shown({"word": "abc"}, random.Random(seed))[1].text for seed in range(600)]

    assert {"".join(sorted(answer)) for answer in answers} == {"abc"}
    assert 60 < answers.count("cba") < 140


@pytest.mark.parametrize(("answer", "reward"), [("cba", 1.0), ("abc", 0.0), ("cb", 0.0), (None, 0.0)])
async def test_only_the_reversed_word_is_right(answer: str | None, reward: float) -> None:
    assert (await play("rev", {"word": "abc"}, {"content": answer}))[0] == reward


async def test_the_model_gets_the_calculators_result_and_repeats_it() -> None:
    sample = {"sum": "12+34", "result": "46"}
    reward, client = await play("tool", sample, call('{"x": "12+34"}'), {"content": "46"})

    assert reward == 1.0
    roles = [message["role"] for message in client.asked[1]["messages"]]
    assert roles == ["user", "assistant", "tool"]
    assert client.asked[1]["messages"][2]["content"] == "46"


@pytest.mark.parametrize(
    "answers",
    [
        [{"content": "12"}],
        [call('{"x": "12+34"}'), {"content": "34"}],
        [call('{"x": "12+43"}'), {"content": "55"}],
        [call('{"x": "12+34"}'), call('{"x": "12+34"}')],
    ],
    ids=["not asked", "not listened to", "asked for another sum", "asked twice"],
)
async def test_only_the_sum_has_a_reward(answers: Sequence[Mapping[str, Any]]) -> None:
    assert (await play("tool", {"sum": "12+34", "result": "46"}, *answers))[0] == 0.0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ('{"x": "12+34"}', "46"),
        ('{"x": "12+"}', "error"),
        ('{"x": 12}', "error"),
        ('{"y": "1+2"}', "error"),
        ('["1+2"]', "error"),
        ("not json", "error"),
        ('{"x": "__import__(1)+2"}', "error"),
    ],
)
def test_the_calculator_answers_any_text(arguments: str, says: str) -> None:
    assert calculated(arguments) == says
