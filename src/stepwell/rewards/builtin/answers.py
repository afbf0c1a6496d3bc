"""The two texts that most reward functions compare: a sample's answer, and the expected answer.

- A missing expected answer is a fault of the data and raises RewardFailed.
- A missing answer is the policy's fault and is the empty string.
"""

import re

from stepwell.errors import BadRequest, RewardFailed
from stepwell.rewards.sample import Sample

ANSWER = "answer"
"""The default key of the expected answer in a trajectory's metadata."""

REASONING_BEGINS, REASONING_ENDS = "<think>", "</think>"
FENCE = re.compile(r"^[ \t]*(```+|~~~+)[ \t]*([^\s`]*)[^\n]*$", re.MULTILINE)


def compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as failure:
        raise BadRequest(f"{pattern!r} is no regular expression: {failure}") from None


def without_reasoning(text: str) -> str:
    """The text after the reasoning; empty if the reasoning never ended."""
    _, ended, after = text.rpartition(REASONING_ENDS)
    if ended:
        return after.strip()
    return "" if REASONING_BEGINS in text else text.strip()


def answer_of(sample: Sample, extract: re.Pattern[str] | None = None) -> str:
    """The last message without its reasoning; with `extract`, the first group of that pattern's last match."""
    text = without_reasoning(_last_message(sample))
    if extract is None:
        return text
    extracted = ""
    for match in extract.finditer(text):
        extracted = match.group(1 if extract.groups else 0) or ""
    return extracted.strip()


def last_block(text: str) -> str | None:
    """The content of the last closed fenced block of Markdown; None if there is none."""
    last: str | None = None
    opening: re.Match[str] | None = None
    for fence in FENCE.finditer(text):
        if opening is None:
            opening = fence
        elif fence.group(1).startswith(opening.group(1)) and not fence.group(2):
            last, opening = text[opening.end() + 1 : fence.start()], None
    return last


def expected_of(sample: Sample, key: str) -> object:
    """metadata[key], or metadata["reward_model"]["ground_truth"]."""
    if key in sample.metadata:
        return sample.metadata[key]
    reward_model = sample.metadata.get("reward_model")
    if isinstance(reward_model, dict) and "ground_truth" in reward_model:
        return reward_model["ground_truth"]
    raise RewardFailed(
        f"trajectory {sample.trajectory_uid!r} has neither {key!r} nor reward_model.ground_truth in its metadata"
    )


def expected_texts(sample: Sample, key: str) -> list[str]:
    """Every correct answer: a list in the metadata means any of its members."""
    expected = expected_of(sample, key)
    texts = [_as_text(sample, each) for each in (expected if isinstance(expected, list) else [expected])]
    if not texts or not all(map(str.strip, texts)):
        raise RewardFailed(
            f"trajectory {sample.trajectory_uid!r} has an empty list of expected answers, or an empty answer"
        )
    return texts


def _last_message(sample: Sample) -> str:
    """Some templates put the beginning of the reasoning into the prompt. Then only prompt and response together show
    that the reasoning never ended."""
    response = sample.response_text
    return response if REASONING_ENDS in response else sample.messages[-1]["content"]


def _as_text(sample: Sample, value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value}"
    raise RewardFailed(
        f"trajectory {sample.trajectory_uid!r} expects {value!r}, which is no text, no number and no list of them"
    )
