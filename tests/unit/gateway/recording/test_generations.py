"""What a gateway knows of its own generations completes the steps that white-box agents make of them."""

from typing import Any

import numpy as np

from rig.builders import make_step
from stepwell.gateway.routes.whitebox_routes import Generations, Told
from stepwell.steps.step import Step

BLANK: dict[str, Any] = {"temperature": None, "sampling": {}, "version_spans": (), "policy_version": 0, "model": ""}
WARM = Told(3, (), {"temperature": 1.0}, 1.0, "tiny", "stop")
COLD = Told(3, (), {"temperature": 0.5}, 0.5, "tiny", "stop")


def step(*response: int, prompt: tuple[int, ...] = (1, 2), logprob: float | None = None) -> Step:
    logprobs = None if logprob is None else np.full(len(response), logprob, np.float32)
    return make_step("t", prompt_ids=list(prompt), response_ids=list(response), response_logprobs=logprobs, **BLANK)


def test_a_step_is_recognised_by_its_tokens_with_log_probabilities_or_without() -> None:
    generations = Generations()
    generations.add(step(3, logprob=-1.0), COLD)
    for same in (step(3, logprob=-1.0), step(3)):
        completed = generations.complete(same)
        assert (completed.temperature, completed.policy_version, completed.model) == (0.5, 3, "tiny")
    for other in (step(3, logprob=-2.0), step(2, 3, prompt=(1,))):
        assert generations.complete(other) is other


def test_what_two_generations_of_the_same_tokens_tell_differently_is_not_known() -> None:
    generations = Generations()
    for told, logprob in ((WARM, -1.0), (COLD, -0.5), (WARM, -1.0)):
        generations.add(step(3, logprob=logprob), told)
    completed = generations.complete(step(3))
    assert (completed.temperature, completed.sampling, completed.policy_version) == (None, {}, 3)
    assert generations.complete(step(3, logprob=-0.5)).temperature == 0.5


def test_what_the_step_itself_says_stays() -> None:
    generations = Generations()
    generations.add(step(3, logprob=-1.0), COLD)
    said = make_step("t", prompt_ids=[1, 2], response_ids=[3], **{**BLANK, "temperature": 0.8})
    assert generations.complete(said).temperature == 0.8
    assert generations.complete(said).sampling == {}


def test_the_oldest_generations_are_forgotten() -> None:
    generations = Generations(most=2)
    for last in (3, 4, 5):
        generations.add(step(last, logprob=-1.0), WARM)
    assert generations.complete(step(3)).temperature is None
    assert generations.complete(step(5)).temperature == 1.0
