"""Stepwell: middleware between LLM agents and a trainer that learns from their calls."""

from stepwell.client import Run, TrajectoryContext, connect
from stepwell.errors import StepwellError

__all__ = ["Run", "StepwellError", "TrajectoryContext", "connect"]
