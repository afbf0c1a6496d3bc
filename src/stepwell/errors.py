"""Failures, named by the boundary they cross.

A message is written for the person who reads it: what happened, and what to do. The gateway turns each class into an
HTTP answer in one place (gateway/http/error_responses.py); nothing else catches them blindly.
"""

import re


class StepwellError(Exception):
    """Anything Stepwell itself reports. Its text is meant to be shown as it is."""

    @classmethod
    def code(cls) -> str:
        """Its name on the wire: UnknownTrajectory is unknown_trajectory."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    def __reduce__(self) -> tuple[type["StepwellError"], tuple[str]]:
        return type(self), (str(self),)  # crosses process borders (Ray) as the same class with the same text


class BadRequest(StepwellError):
    """What was asked is malformed or breaks a rule; asking again will not help."""


class UnknownTrajectory(StepwellError):
    """No trajectory by that name is registered."""


class Forbidden(StepwellError):
    """The key is missing, wrong, or not for this."""


class TooLarge(StepwellError):
    """The request is larger than the gateway takes."""


class Overloaded(StepwellError):
    """More calls are in flight than the gateway takes; there will be room in a moment."""


class Conflict(StepwellError):
    """The request contradicts what is already there."""


class PoolFull(StepwellError):
    """The channel has no room and does not drop; there will be room once the trainer has taken some."""


class PoolUnavailable(StepwellError):
    """The DataPool is missing, restarting, or did not answer in time."""


class JournalRefused(StepwellError):
    """The pool's journal cannot be used; nothing was changed in it."""


class LeaseExpired(StepwellError):
    """The time was up before the batch was acknowledged; its data will be handed out again."""


class FetchTimeout(StepwellError):
    """A batch did not become ready in time; the text says what was waited for."""


class EngineUnavailable(StepwellError):
    """No inference engine could be reached, or what it answered could not be read."""


class NotReady(StepwellError):
    """A part of this process is still starting, or was not configured."""


class RewardFailed(StepwellError):
    """The reward worker failed. Never to be mistaken for a reward of zero."""


class SyncFailed(StepwellError):
    """New weights did not reach an engine, or it does not compute with them; the text says what was seen."""


class GatewayUnreachable(StepwellError):
    """The gateway could not be reached, or is no gateway."""


class RayUnreachable(StepwellError):
    """This process could not join the Ray cluster."""


def from_code(code: object, text: str) -> StepwellError:
    """The failure that was sent over the wire under that code."""
    kinds = {kind.code(): kind for kind in StepwellError.__subclasses__()}
    return kinds.get(str(code), StepwellError)(text)
