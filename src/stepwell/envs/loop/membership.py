"""An environment's place at the rollout server.

What always holds: the server may go away and come back, and may have forgotten the environment when it does; then it is
registered again, under another number, and goes on. What the environment has, it keeps.
"""

import logging

from stepwell.envs.base import BaseEnv
from stepwell.envs.loop.pace import Terms, max_workers
from stepwell.envs.rollout_server.client import Registration, RolloutServer, Status
from stepwell.envs.scored_data import ScoredDataGroup
from stepwell.errors import BadRequest, RolloutServerAway, RolloutServerRefused, StepwellError

log = logging.getLogger("stepwell.envs")


class Membership:
    """Made by `join`."""

    def __init__(self, env: BaseEnv, server: RolloutServer, known: Registration) -> None:
        self.known = known
        self._env, self._server = env, server
        self._is_away = False

    async def look(self) -> Status | None:
        """How things are at the server; None while it does not answer."""
        try:
            status = await self._server.status(self.known.env_id)
        except RolloutServerRefused as refused:
            log.warning("registering again: %s", refused)
            self.known = await _register(self._env, self._server)
            return None
        except RolloutServerAway as away:
            if not self._is_away:
                log.warning("no groups are started for now: %s", away)
            self._is_away = True
            return None
        self._is_away = False
        return status

    async def send(self, group: ScoredDataGroup) -> str:
        return await self._server.send(group, self.known.env_id)

    async def leave(self) -> None:
        try:
            await self._server.disconnect(self.known.env_id)
        except StepwellError as failure:
            log.warning("left without a word: %s", failure)


async def join(env: BaseEnv, server: RolloutServer) -> Membership:
    """Waits for the server and its trainer."""
    known = await _register(env, server)
    log.info("registered as %s, at step %d", known.wandb_name, known.starting_step)
    return Membership(env, server, known)


async def agree(env: BaseEnv, server: RolloutServer, known: Registration) -> tuple[Terms, int | None]:
    """The terms of the work, and the longest sequence the trainer takes. BadRequest if they make no sense."""
    batch_size, max_token_len = await server.info()
    if batch_size == -1:
        batch_size = env.config.batch_size
    if env.config.group_size > batch_size:
        raise BadRequest(
            f"a group of {env.config.group_size} does not fit into the trainer's batch of {batch_size} sequences"
            if batch_size > 0
            else "neither the rollout server nor --env.batch-size says how many sequences a batch has"
        )
    terms = terms_of(env, known, batch_size)
    if terms.total_steps == -1:
        raise BadRequest("neither the rollout server nor --env.total-steps says how many steps there are to be")
    return terms, max_token_len if max_token_len > 0 else None


def terms_of(env: BaseEnv, known: Registration, batch_size: int) -> Terms:
    config = env.config
    return Terms(
        group_size=config.group_size,
        batch_size=batch_size,
        max_workers=max_workers(config, len(env.server_configs)),
        max_batches_offpolicy=config.max_batches_offpolicy,
        min_batch_allocation=config.min_batch_allocation,
        total_steps=known.num_steps if config.total_steps == -1 else config.total_steps,
        steps_per_eval=config.steps_per_eval,
        eval_handling=config.eval_handling,
        eval_limit_ratio=config.eval_limit_ratio,
        checkpoint_interval=known.checkpoint_interval,
    )


async def _register(env: BaseEnv, server: RolloutServer) -> Registration:
    return await server.register_env(
        {
            "max_token_length": env.config.max_token_length,
            "desired_name": env.name,
            "weight": env.config.inference_weight,
            "min_batch_allocation": env.config.min_batch_allocation,
            "group_size": env.config.group_size,
        }
    )
