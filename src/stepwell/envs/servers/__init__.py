"""The servers an environment samples from: anything that speaks OpenAI's API, Stepwell's gateway first."""

from stepwell.envs.servers.managed import ManagedServer
from stepwell.envs.servers.manager import ServerManager
from stepwell.envs.servers.node import SequenceNode

__all__ = ["ManagedServer", "SequenceNode", "ServerManager"]
