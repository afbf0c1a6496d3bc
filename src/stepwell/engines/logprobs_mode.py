"""Finds out whether an engine reports log-probabilities of the distribution that it samples from.

The likeliest next token is asked for at two temperatures. Raw log-probabilities are the same at both.
"""

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from stepwell.errors import EngineUnavailable
from stepwell.steps.step import JsonObject
from stepwell.steps.trainable import PROCESSED, RAW, UNKNOWN_MODE
from stepwell.wire.openai import read_object

PROMPT = "Once upon a time"
TEMPERATURES = (0.5, 2.0)
TOLERANCE = 0.02
"""Half precision may change a log-probability from one call to the next."""
PROBE_USER = "stepwell-probe"
"""The `user` of these requests, by which a server's log can tell them."""


AskForCompletion: TypeAlias = Callable[[JsonObject], Awaitable[bytes | None]]
"""Sends a request for a completion; gives the body of the reply, None if it was refused. EngineUnavailable if there is
none now."""


async def probe_logprobs_mode(ask: AskForCompletion, model: str) -> str:
    """RAW or PROCESSED; UNKNOWN_MODE if the engine does not tell, or the next token is certain at both temperatures."""
    cold, hot = [await _likeliest(ask, model, temperature) for temperature in TEMPERATURES]
    if cold is None or hot is None or min(cold, hot) > -TOLERANCE:
        return UNKNOWN_MODE
    return RAW if abs(cold - hot) <= TOLERANCE else PROCESSED


async def _likeliest(ask: AskForCompletion, model: str, temperature: float) -> float | None:
    """The largest log-probability of a next token."""
    sampling: JsonObject = {"temperature": temperature, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "logprobs": 1}
    raw = await ask({"model": model, "prompt": PROMPT, "max_tokens": 1, "user": PROBE_USER, **sampling})
    try:
        choices: Any = read_object(raw or b"", "answer")["choices"]
        return max(map(float, choices[0]["logprobs"]["top_logprobs"][0].values()))
    except (EngineUnavailable, KeyError, TypeError, ValueError, IndexError, AttributeError):
        return None
