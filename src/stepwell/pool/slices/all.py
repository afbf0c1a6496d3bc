"""The features that have state or work of their own in every shard.

Another one is a row here, after its class in a module beside this one.
"""

from stepwell.pool.slices.curation import AuditTrail
from stepwell.pool.slices.forgetting_work import Forgetting
from stepwell.pool.slices.silence import IdleSessions, SilentHolders
from stepwell.pool.state.slice import Slice

SLICES: tuple[type[Slice], ...] = (AuditTrail, Forgetting, SilentHolders, IdleSessions)
