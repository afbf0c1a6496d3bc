"""Environments: make rollouts, score them, and send them to a rollout server, from which trainers take them.

An environment reaches the servers that it samples from and the rollout server over HTTP. It does not know Ray or the
pool. The names are Atropos'; `python -m stepwell.envs FILE` runs a file that imports them from atroposlib.
"""

from stepwell.envs.base import BaseEnv
from stepwell.envs.config import APIServerConfig, BaseEnvConfig, EvalHandling, ServerBaseline
from stepwell.envs.scored_data import Item, Message, ScoredDataGroup, ScoredDataItem, gather, tokenize_for_trainer
from stepwell.envs.servers import ServerManager

EvalHandlingEnum = EvalHandling
"""Atropos' name."""
OpenaiConfig = APIServerConfig
"""The name in older versions of Atropos."""

__all__ = [
    "APIServerConfig",
    "BaseEnv",
    "BaseEnvConfig",
    "EvalHandling",
    "EvalHandlingEnum",
    "Item",
    "Message",
    "OpenaiConfig",
    "ScoredDataGroup",
    "ScoredDataItem",
    "ServerBaseline",
    "ServerManager",
    "gather",
    "tokenize_for_trainer",
]
