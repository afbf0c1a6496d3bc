"""Environments: what makes rollouts, scores them, and sends them where trainers find them.

An environment knows servers to sample from and a rollout server to send to, both by HTTP; it knows neither Ray nor
the pool.
"""

from stepwell.envs.base import BaseEnv
from stepwell.envs.config import APIServerConfig, BaseEnvConfig, EvalHandling
from stepwell.envs.scored_data import Item, ScoredDataGroup, ScoredDataItem, gather

__all__ = [
    "APIServerConfig",
    "BaseEnv",
    "BaseEnvConfig",
    "EvalHandling",
    "Item",
    "ScoredDataGroup",
    "ScoredDataItem",
    "gather",
]
