"""What a reward model's server may answer, and what is made of it. The real one is asked in tests/e2e."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from stepwell.errors import RewardFailed
from stepwell.rewards.loading import load
from tests.unit.rewards.texts import answered


class Served:
    """Answers everything with `answer`, and keeps what it was asked."""

    def __init__(self) -> None:
        self.answer: Any = {}
        self.asked: list[tuple[str, Any]] = []
        self.url = ""

    async def reply(self, request: web.Request) -> web.Response:
        self.asked.append((request.path, await request.json()))
        return web.json_response(self.answer)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    served = Served()
    app = web.Application()
    app.router.add_post("/{path:.*}", served.reply)
    async with TestServer(app) as server:
        served.url = str(server.make_url("/"))
        yield served


async def ask(served: Served, **options: Any) -> float:
    result: Any = load("reward_model", {"url": served.url, "model": "rm", **options}).call(answered("Certainly."))
    score: float = await result
    return score


async def test_the_conversation_is_sent_and_the_heads_number_comes_back(served: Served) -> None:
    served.answer = {"data": [{"index": 0, "probs": [-1.5], "num_classes": 1}]}
    assert await ask(served) == -1.5
    messages = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "Certainly."}]
    assert served.asked == [("/classify", {"model": "rm", "messages": messages, "use_activation": False})]


@pytest.mark.parametrize(("data", "score"), [([0.25], 0.25), ([[0.1], [0.2], [0.75]], 0.75)])
async def test_pooling_gives_one_number_or_the_last_tokens(served: Served, data: Any, score: float) -> None:
    served.answer = {"data": [{"index": 0, "data": data}]}
    assert await ask(served, route="pooling", activation=True) == score
    assert served.asked[0][0] == "/pooling"
    assert served.asked[0][1]["use_activation"] is True


async def test_of_several_labels_one_is_named(served: Served) -> None:
    served.answer = {"data": [{"probs": [0.2, 0.8]}]}
    assert await ask(served, label=1) == 0.8
    with pytest.raises(RewardFailed, match="returns 2 numbers: choose one with 'label'"):
        await ask(served)
    with pytest.raises(RewardFailed, match="no number as label 2"):
        await ask(served, label=2)


@pytest.mark.parametrize(
    "answer", [{}, {"data": []}, {"data": [{"probs": []}]}, {"data": [{"probs": [None]}]}, {"data": [{"probs": "x"}]}]
)
async def test_an_answer_of_another_shape_is_an_error(served: Served, answer: Any) -> None:
    served.answer = answer
    with pytest.raises(RewardFailed):
        await ask(served)
