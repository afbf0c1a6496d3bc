"""The servers that an environment samples from: Stepwell's gateway, or any server with OpenAI's API."""

from stepwell.envs.servers import ManagedServer, ManagedServerAdapter, ServerManager
from stepwell.envs.servers.sequences import SequenceNode

__all__ = ["ManagedServer", "ManagedServerAdapter", "SequenceNode", "ServerManager"]
