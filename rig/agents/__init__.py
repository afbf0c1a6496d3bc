"""Real agents for tests: each is given a base_url, a key, a prompt and a folder to work in, and nothing else.

They run as processes of their own, in an environment of their own (scripts/agent_envs.py), and reach no address but
this machine's.
"""

from rig.agents.agent import AGENTS, Agent
from rig.agents.engine import TaskEngine
from rig.agents.process import installed

__all__ = ["AGENTS", "Agent", "TaskEngine", "installed"]
