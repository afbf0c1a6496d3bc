"""Environments: make rollouts, score them, and send them to a rollout server, from which trainers take them.

An environment reaches the servers that it samples from and the rollout server over HTTP. It does not know Ray or the
pool.
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
