"""Stepwell: the pool of steps between agents that live and a trainer that learns."""

from stepwell.client import Run, Trajectory, connect
from stepwell.errors import StepwellError

__all__ = ["Run", "StepwellError", "Trajectory", "connect"]
