"""The module that verl imports to know the trainer mode `stepwell`:
VERL_USE_EXTERNAL_MODULES=stepwell.trainers.verl.trainer_mode.

`config/stepwell.yaml` sets this for all processes of a run.
"""

from verl.workers.rollout.replica import RolloutReplicaRegistry

from stepwell.trainers.verl.trainer_mode import BACKEND, PoolCheckpointEngine, PoolTrainer

__all__ = ["NoReplica", "PoolCheckpointEngine", "PoolTrainer"]


class NoReplica:
    """verl starts no engine: those of the pool serve."""


RolloutReplicaRegistry.register(BACKEND, lambda: NoReplica)
