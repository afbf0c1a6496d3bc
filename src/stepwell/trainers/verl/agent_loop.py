"""verl's agent loop manager where agents run by themselves, elsewhere, through a gateway."""

from typing import Any

from stepwell.errors import BadRequest


class PoolAgentLoopManager:
    """`actor_rollout_ref.rollout.agent.agent_loop_manager_class`. verl asks it for nothing: the sampler takes rollouts
    from the pool."""

    @classmethod
    def create(cls, **given: Any) -> "PoolAgentLoopManager":
        """verl passes its configuration and its own clients, of which none is needed."""
        return cls()

    def generate_sequences(self, prompts: Any) -> None:
        raise BadRequest("the mode stepwell starts no rollouts: agents do, through a gateway of the pool")
