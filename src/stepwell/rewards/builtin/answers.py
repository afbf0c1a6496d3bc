"""The two texts that most reward functions compare: what a sample answers, and what was expected of it.

What always holds: an expected answer that is missing is the data's fault and raises RewardFailed; an answer that is
missing is the candidate's, and is the empty string.
"""

import re

from stepwell.errors import BadRequest, RewardFailed
from stepwell.rewards.sample import Sample
from stepwell.steps.step import JsonObject

ANSWER = "answer"
"""Where the expected answer stands in a trajectory's metadata, unless told otherwise."""

REASONING_BEGINS, REASONING_ENDS = "<think>", "</think>"


def compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as failure:
        raise BadRequest(f"{pattern!r} is no regular expression: {failure}") from None


def without_reasoning(text: str) -> str:
    """What stands after the reasoning; nothing, if the reasoning never ended."""
    _, ended, after = text.rpartition(REASONING_ENDS)
    if ended:
        return after.strip()
    return "" if REASONING_BEGINS in text else text.strip()


def answer_of(sample: Sample, extract: re.Pattern[str] | None = None) -> str:
    """The last message without its reasoning; with `extract`, what its last match holds (in its first group)."""
    text = without_reasoning(_last_message(sample))
    if extract is None:
        return text
    found = ""
    for match in extract.finditer(text):
        found = match.group(1 if extract.groups else 0) or ""
    return found.strip()


def _last_message(sample: Sample) -> str:
    """Some templates begin the reasoning in the prompt: then only prompt and response tell that it never ended."""
    response = sample.response_text
    return response if REASONING_ENDS in response else sample.messages[-1]["content"]


def expected_of(sample: Sample, key: str) -> object:
    """metadata[key], or metadata["reward_model"]["ground_truth"]."""
    if key in sample.metadata:
        return sample.metadata[key]
    described = sample.metadata.get("reward_model")
    if isinstance(described, dict) and "ground_truth" in described:
        return described["ground_truth"]
    raise RewardFailed(
        f"trajectory {sample.trajectory_uid!r} has neither {key!r} nor reward_model.ground_truth in its metadata"
    )


def expected_texts(sample: Sample, key: str) -> list[str]:
    """Every answer that would be right: a list in the metadata means any of its members."""
    expected = expected_of(sample, key)
    texts = [_as_text(sample, each) for each in (expected if isinstance(expected, list) else [expected])]
    if not texts:
        raise RewardFailed(f"trajectory {sample.trajectory_uid!r} expects one of no answers")
    return texts


def expected_object(sample: Sample, key: str) -> JsonObject:
    expected = expected_of(sample, key)
    if not isinstance(expected, dict):
        raise RewardFailed(f"trajectory {sample.trajectory_uid!r}: {key!r} is {type(expected).__name__}, not an object")
    return expected


def _as_text(sample: Sample, value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value}"
    raise RewardFailed(
        f"trajectory {sample.trajectory_uid!r} expects {value!r}, which is no text, no number and no list of them"
    )
