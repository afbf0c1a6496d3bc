"""The published atroposlib, for tests: its server, an environment of its own kind and its example trainer's client.

They run as processes of their own, in an environment of their own (scripts/atropos_env.py), and reach no address but
this machine's. The two programs know a URL and nothing of Stepwell.
"""

from rig.atropos.consuming import GROUPS, QUEUE_LIMIT, Consumed, consume
from rig.atropos.processes import atropos_python, atropos_server

__all__ = ["GROUPS", "QUEUE_LIMIT", "Consumed", "atropos_python", "atropos_server", "consume"]
