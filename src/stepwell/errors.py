"""Failures, named by the boundary they cross.

A message says what happened and what to do. The gateway turns each class into an HTTP response in one place
(gateway/error_responses.py).
"""

import json
import re

WEIGHTS = "weights"
"""The part that a gateway's /ready names while all engines wait for weights that nobody brings. Calls fail until
somebody acts; everything else works."""


class StepwellError(Exception):
    """The base of all failures that Stepwell reports. Its text is shown to the user unchanged."""

    @classmethod
    def code(cls) -> str:
        """The name of the failure in JSON: UnknownTrajectory is unknown_trajectory."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    def __reduce__(self) -> tuple[type["StepwellError"], tuple[str]]:
        return type(self), (str(self),)  # keeps class and text between processes (Ray)


class BadRequest(StepwellError):
    """The request is malformed or breaks a rule; a retry does not help."""


class UnknownTrajectory(StepwellError):
    """No trajectory with this uid is registered."""


class UnknownAddress(StepwellError):
    """The server has nothing at this path; the text names the right one."""


class ModelNotFound(StepwellError):
    """The request names a model that it may not use."""


class PreviousResponseNotFound(StepwellError):
    """The request continues a response that is not stored."""


class Forbidden(StepwellError):
    """The key is missing, unknown, expired, or revoked."""


class NotPermitted(StepwellError):
    """The key is valid, but its role or its scope does not allow this request."""


class WrongHost(StepwellError):
    """The request names a host by which the server may not be asked."""


class CrossSite(StepwellError):
    """A page of another site made a browser send the request."""


class UnsupportedMediaType(StepwellError):
    """The body has a type that the server does not read."""


class TooLarge(StepwellError):
    """The request is larger than the gateway accepts."""


class ContextLengthExceeded(StepwellError):
    """The conversation is longer than the model's context."""


class Overloaded(StepwellError):
    """The gateway has its largest number of calls in flight; a retry helps."""


class Conflict(StepwellError):
    """The request contradicts existing data."""


class Forgotten(StepwellError):
    """The data of this subject was deleted, and nothing of it is taken any more; a retry does not help."""


class PoolFull(StepwellError):
    """The channel is full and drops nothing; a retry helps after the trainer has taken groups."""


class IncompatibleMessage(StepwellError):
    """Another process of the pool is of a release with which this one cannot talk."""


class PoolUnavailable(StepwellError):
    """The DataPool is missing, restarting, or did not answer in time."""


class JournalRefused(StepwellError):
    """The pool's journal cannot be used; it was not changed."""


class LeaseExpired(StepwellError):
    """The lease ended before the batch was acknowledged; its data is leased again."""


class FetchTimeout(StepwellError):
    """No batch became ready in time; the text says what was missing."""


class EngineUnavailable(StepwellError):
    """No engine could be reached, or its answer could not be read."""


class NotReady(StepwellError):
    """A part of this process is starting, or is not configured."""


class RewardFailed(StepwellError):
    """The reward worker failed. This is not a reward of zero."""


class SyncFailed(StepwellError):
    """New weights did not reach an engine, or it does not use them; the text says what was observed."""


class EngineSilent(SyncFailed):
    """The engine did not answer: it is down, or still busy with what it was asked."""


class NothingLearned(StepwellError):
    """Nothing could be learned from several batches in a row; the text says why, and what to do."""


class GatewayUnreachable(StepwellError):
    """The gateway could not be reached, or the address is not a gateway."""


class RayUnreachable(StepwellError):
    """This process could not join the Ray cluster."""


class RayRefused(RayUnreachable):
    """The Ray cluster does not let this process in; a retry does not help."""


class RolloutServerAway(StepwellError):
    """The rollout server cannot be reached, or cannot answer now; a retry may help."""


class RolloutServerRefused(StepwellError):
    """The rollout server refuses the data; a retry does not help."""


class EnvironmentFailed(StepwellError):
    """The environment's own code failed too often."""


def from_answer(url: str, status: int, raw: bytes) -> StepwellError:
    """The failure that a gateway reports in its answer, for a client that reads it."""
    kinds = {kind.code(): kind for kind in StepwellError.__subclasses__()}
    try:
        body = json.loads(raw)
        if "missing" in body:
            return NotReady("; ".join(f"{part}: {why}" for part, why in body["missing"].items()))
        of_status = EngineUnavailable if status >= 500 else BadRequest  # for an engine's own codes
        return kinds.get(str(body["error"]["code"]), of_status)(str(body["error"]["message"]))
    except (ValueError, TypeError, KeyError):
        return GatewayUnreachable(f"{url} answers {status} and is not a Stepwell gateway")
