"""Samples made from texts."""

import numpy as np

from rig.chatml import render_chat
from stepwell.rewards.sample import Sample, SampleStep
from stepwell.steps.step import JsonObject


def step(response: str, *, prompt: str = "What is it?", tokens: int = 0, untrainable: str | None = None) -> SampleStep:
    """A step of a conversation that the user's prompt began; `tokens` is how many the response is said to have."""
    rendered = render_chat([{"role": "user", "content": prompt}])
    ids = np.zeros(tokens or len(response), np.int32)
    return SampleStep(prompt_ids=ids, response_ids=ids, texts=(rendered, response), untrainable=untrainable)


def trajectory(*steps: SampleStep, metadata: JsonObject | None = None) -> Sample:
    return Sample(trajectory_uid="t", prompt_uid="p", metadata=metadata or {}, steps=steps, num_turns=len(steps))


def answered(response: str, answer: object = None, **metadata: object) -> Sample:
    """One step, and what was expected of it."""
    known = {"answer": answer, **metadata} if answer is not None else metadata
    return trajectory(step(response), metadata=known)  # type: ignore[arg-type]
