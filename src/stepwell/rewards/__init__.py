"""Rewards: functions that score a rollout, and the workers that run them. Authors of functions import from here."""

from stepwell.pool.api.scoring import Score
from stepwell.rewards.sample import Sample

__all__ = ["Sample", "Score"]
