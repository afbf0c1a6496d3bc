"""The fake engine's log-probabilities: a token's follows from the token and its place, whoever wrote it.

So a reply can be scored again as a prompt, and gets what it got when it was sampled.
"""

from collections.abc import Sequence

from rig.fake_engine.asking import Json


def logprobs_of(ids: Sequence[int], start: int, temperature: float = 1.0) -> list[float]:
    """Of tokens that stand at `start` and after it."""
    scale = 64 * scale_of(temperature)
    return [-(1 + (37 * token + 11 * place) % 256) / scale for place, token in enumerate(ids, start)]


def scale_of(temperature: float) -> float:
    """By which log-probabilities are divided. Temperature 0 counts as 1; vLLM takes no less than 0.01."""
    return max(temperature, 0.01) if temperature else 1.0


def prompt_logprobs(ids: Sequence[int]) -> list[Json | None]:
    """As vLLM tells them: none for the first token."""
    scored = zip(ids[1:], logprobs_of(ids[1:], 1), strict=True)
    return [None, *({str(token): {"logprob": value, "rank": 1, "decoded_token": ""}} for token, value in scored)]
