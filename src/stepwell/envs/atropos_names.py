"""Atropos' names for what stepwell.envs has. atropos_imports gives them to files that import atroposlib."""

from typing import Any

from stepwell.envs import (
    APIServerConfig,
    BaseEnv,
    BaseEnvConfig,
    EvalHandlingEnum,
    Item,
    Message,
    OpenaiConfig,
    ScoredDataGroup,
    ScoredDataItem,
    ServerBaseline,
    ServerManager,
    tokenize_for_trainer,
)
from stepwell.envs.servers import ManagedServer, ManagedServerAdapter, SequenceNode
from stepwell.envs.servers.server import Server as APIServer

number = int | float
UUID = str
Content = str | list[dict[str, Any]]
GameHistory = list[dict[str, Any]]

__all__ = [
    "UUID",
    "APIServer",
    "APIServerConfig",
    "BaseEnv",
    "BaseEnvConfig",
    "Content",
    "EvalHandlingEnum",
    "GameHistory",
    "Item",
    "ManagedServer",
    "ManagedServerAdapter",
    "Message",
    "OpenaiConfig",
    "ScoredDataGroup",
    "ScoredDataItem",
    "SequenceNode",
    "ServerBaseline",
    "ServerManager",
    "number",
    "tokenize_for_trainer",
]
