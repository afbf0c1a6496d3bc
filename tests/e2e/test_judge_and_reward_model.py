"""Real vLLM as the judge, and as the server of a reward model."""

import asyncio
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rig.tiny_model import make_tiny_classifier
from rig.vllm_server import VllmServer, start_vllm, vllm_python
from stepwell.errors import RewardFailed
from stepwell.pool.api.scoring import JudgementOutcome, Score
from stepwell.rewards.loading import load
from stepwell.rewards.runner.messages import Job
from stepwell.rewards.runner.runner import RewardRunner
from stepwell.rewards.sample import Sample
from tests.unit.rewards.texts import answered, step, trajectory

QUESTION = "What is it?"
REFERENCE_PROGRAM = """
import json, sys, torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

question = json.load(sys.stdin)
tokenizer = AutoTokenizer.from_pretrained(question["model"])
model = AutoModelForSequenceClassification.from_pretrained(question["model"], dtype=torch.float32)
text = tokenizer.apply_chat_template(question["messages"], tokenize=False)
with torch.inference_mode():
    logits = model(torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])).logits
print(json.dumps(logits[0].tolist()))
"""


def reference_score(model: Path, answer: str) -> float:
    """What transformers computes."""
    messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": answer}]
    question = json.dumps({"model": str(model), "messages": messages})
    done = subprocess.run([vllm_python(), "-c", REFERENCE_PROGRAM], input=question, stdout=subprocess.PIPE, text=True)
    done.check_returncode()
    (score,) = json.loads(done.stdout.splitlines()[-1])
    return float(score)


async def score(sample: Sample, name: str, **options: Any) -> Any:
    result: Any = load(name, {"model": "tiny", **options}).call(sample)
    return await result


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_classifier(tmp_path_factory.mktemp("classifier"))


@pytest.fixture(scope="module")
def reward_server(classifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    log = tmp_path_factory.mktemp("reward_vllm") / "vllm.log"
    with start_vllm(classifier, log=log) as server:
        yield server


async def test_a_random_model_judges_if_its_answers_are_held_to_the_form(vllm: VllmServer) -> None:
    given = await score(
        answered("Certainly, with pleasure."),
        "judge",
        url=f"{vllm.url}/v1",
        rubric="Is it polite?",
        scale=(1, 5),
        votes=3,
        temperature=1.0,
    )
    assert isinstance(given, Score)
    votes = sorted(given.parts.values())
    assert len(votes) >= 2
    assert set(votes) <= {0.0, 0.25, 0.5, 0.75, 1.0}
    assert votes[0] <= given.value <= votes[-1]


async def test_a_runners_child_asks_the_judge(vllm: VllmServer) -> None:
    options: Any = {"url": f"{vllm.url}/v1", "model": "tiny", "rubric": "Is it polite?", "temperature": 1.0, "votes": 2}
    async with RewardRunner(Job(function="judge", options=options, children=1, timeout=120)) as runner:
        attempts = await asyncio.gather(*(runner.run(answered(f"Certainly, {n} times.")) for n in range(4)))
    assert [(attempt.outcome, attempt.why) for attempt in attempts] == [(JudgementOutcome.SCORE, "")] * 4


async def test_a_random_model_that_is_not_held_to_it_gives_no_score(vllm: VllmServer) -> None:
    """A judge that writes nonsense, here because its answers are cut short, is an error and no 0."""
    with pytest.raises(RewardFailed, match="0 of 3 votes"):
        await score(
            answered("Certainly."),
            "judge",
            url=f"{vllm.url}/v1",
            rubric="Is it polite?",
            votes=3,
            temperature=1.0,
            max_tokens=4,
        )


async def test_a_judge_that_does_not_exist_is_an_error_with_the_servers_words(vllm: VllmServer) -> None:
    with pytest.raises(RewardFailed, match="answered 404.*does not exist"):
        await score(answered("x"), "judge", url=f"{vllm.url}/v1", model="another", rubric="Is it polite?")


@pytest.mark.nightly
async def test_a_reward_models_score_is_the_one_that_transformers_computes(
    reward_server: VllmServer, classifier: Path
) -> None:
    answer = "Certainly, with pleasure."
    expected = reference_score(classifier, answer)
    for route in ("classify", "pooling"):
        given = await score(answered(answer), "reward_model", url=reward_server.url, route=route)
        assert given == pytest.approx(expected, abs=1e-3), route
    other = await score(answered("No!"), "reward_model", url=reward_server.url)
    assert abs(other - expected) > 0.01, "the model cannot tell texts apart"

    sigmoid = await score(answered(answer), "reward_model", url=reward_server.url, activation=True)
    assert 0 < sigmoid < 1

    steps = trajectory(step("No!"), step("a title", untrainable="side_call:title"), step(answer))
    options: Any = {"function": "reward_model", "options": {"url": reward_server.url, "model": "tiny"}}
    given = await load("per_step", options).call(steps)  # type: ignore[misc]
    assert given.step_rewards == pytest.approx((other / 2, None, expected / 2), abs=1e-3)
    assert given.value == pytest.approx((other + expected) / 2, abs=1e-3)
