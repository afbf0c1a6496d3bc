"""The reward of an answer: 1 if it has the right number at the first try, half of that at a later one."""

from stepwell.rewards import Sample


def score(sample: Sample) -> float:
    right = str(sample.metadata["answer"]) in sample.response_text
    return float(right) / sample.num_turns
