"""Failures of environments, in words for whoever runs one."""

from stepwell.errors import StepwellError


class RolloutServerAway(StepwellError):
    """The rollout server cannot be reached, or cannot answer now; asking again may help."""


class RolloutServerRefused(StepwellError):
    """The rollout server does not take what it was given; asking again will not help."""


class EnvironmentFailed(StepwellError):
    """The environment's own code failed so often that going on makes no sense."""
