"""Why a rollout failed: through the policy, or through the infrastructure around it. Pure.

- A failure of the policy completes the rollout with a reward, and it is trained. If it were aborted and sampled again,
  the model would never learn that it was wrong.
- A failure of the infrastructure says nothing about the policy: the rollout is aborted and tried again.
- An exception that is not known counts as the policy's: most exceptions of an agent's code come from what the model
  wrote. `retry_on` names those that do not.
"""

import socket
from enum import StrEnum

import aiohttp

from stepwell.errors import BadRequest, ContextLengthExceeded, StepwellError, TooLarge


class AgentFailure(StrEnum):
    TOO_LONG = "too_long"
    """It took longer than the flow's timeout, or an operation of its own timed out."""
    CONTEXT_OVERFLOW = "context_overflow"
    """The conversation became longer than the model's context."""
    GAVE_UP = "gave_up"
    """The agent said so, with AgentFailed."""
    BROKE_FORMAT = "broke_format"
    """The agent said so, with AgentFailed: it cannot use what the model wrote."""
    ERROR = "error"
    """Any other exception of the agent's code, or a reward that is not a number."""


class AgentFailed(Exception):
    """Raised by an agent to end its rollout with a failure of the policy."""

    def __init__(self, failure: AgentFailure | str, why: str = "", *, reward: float | None = None) -> None:
        """`reward` is used instead of the flow's reward for such failures."""
        super().__init__(why or str(failure))
        self.failure = AgentFailure(failure)
        self.reward = reward


OF_THE_POLICY = (BadRequest, TooLarge)
"""Refusals of a gateway that the content of a call causes; all other ones are the infrastructure's."""
CONTENT_STATUSES = (400, 413, 422)
"""The same, as HTTP statuses."""
OVERFLOW_TEXTS = (ContextLengthExceeded.code(), "maximum context length", "prompt is too long")
TIMEOUTS = ("APITimeoutError", "ReadTimeout", "ReadTimeoutError", "TimeoutExpired")
"""Exceptions of clients and of subprocess for an answer that does not come; no base class is common to them."""
HTTP_PACKAGES = ("aiohttp", "anthropic", "httpcore", "httpx", "httpx2", "openai", "requests", "urllib3")
"""Their exceptions are about connections, if they have no HTTP status."""


def failure_of_policy(failure: BaseException, retry_on: tuple[type[BaseException], ...] = ()) -> AgentFailure | None:
    """None for a failure of the infrastructure."""
    if isinstance(failure, AgentFailed):
        return failure.failure
    if isinstance(failure, retry_on):
        return None
    if isinstance(failure, ContextLengthExceeded) or any(text in str(failure) for text in OVERFLOW_TEXTS):
        return AgentFailure.CONTEXT_OVERFLOW
    if isinstance(failure, aiohttp.ConnectionTimeoutError):
        return None
    if isinstance(failure, TimeoutError) or type(failure).__name__ in TIMEOUTS:
        return AgentFailure.TOO_LONG
    return None if _is_of_infrastructure(failure) else AgentFailure.ERROR


def _is_of_infrastructure(failure: BaseException) -> bool:
    match failure:
        case StepwellError():
            return not isinstance(failure, OF_THE_POLICY)
        case object(status_code=int(status)) | object(status=int(status)):  # clients' exceptions have no common class
            return status not in CONTENT_STATUSES
        case ConnectionError() | socket.gaierror():
            return True
    return type(failure).__module__.partition(".")[0] in HTTP_PACKAGES
