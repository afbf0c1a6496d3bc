"""An environment's registration at the rollout server.

The server may become unreachable, and may not know the environment any more when it returns. Then the environment
registers again, gets another number, and continues; it keeps its own state.
"""

import logging

from stepwell.envs.environment import Environment
from stepwell.envs.loop.pace import PaceTerms, max_workers
from stepwell.envs.rollout_server import RolloutServer
from stepwell.envs.scored_data import ScoredDataGroup
from stepwell.errors import BadRequest, RolloutServerAway, RolloutServerRefused, StepwellError
from stepwell.wire.scored_groups import EnvRegistered, EnvRegistration, EnvStatus

log = logging.getLogger("stepwell.envs")


class Membership:
    """Made by `join`."""

    def __init__(self, env: Environment, server: RolloutServer, joined: EnvRegistered) -> None:
        self.joined = joined
        self._env, self._server = env, server
        self._is_unreachable = False

    async def status(self) -> EnvStatus | None:
        """The server's status; None while it does not answer."""
        try:
            status = await self._server.status(self.joined.env_id)
        except RolloutServerRefused as refused:
            log.warning("registering again: %s", refused)
            self.joined = await _register(self._env, self._server)
            return None
        except RolloutServerAway as away:
            if not self._is_unreachable:
                log.warning("no groups are started for now: %s", away)
            self._is_unreachable = True
            return None
        self._is_unreachable = False
        return status

    async def send(self, group: ScoredDataGroup) -> str:
        return await self._server.send(group, self.joined.env_id)

    async def leave(self) -> None:
        try:
            await self._server.disconnect(self.joined.env_id)
        except StepwellError as failure:
            log.warning("the rollout server was not told that the environment leaves: %s", failure)


async def join(env: Environment, server: RolloutServer) -> Membership:
    """Waits for the server and its trainer."""
    joined = await _register(env, server)
    log.info("registered as %s, at step %d", joined.wandb_name, joined.starting_step)
    return Membership(env, server, joined)


async def agree(env: Environment, server: RolloutServer, joined: EnvRegistered) -> tuple[PaceTerms, int | None]:
    """The terms of the run, and the longest sequence that the trainer accepts. BadRequest if they contradict the
    settings or are missing."""
    batch_size, max_token_len = await server.info()
    if batch_size == -1:
        batch_size = env.config.batch_size
    if env.config.group_size > batch_size:
        raise BadRequest(
            f"a group of {env.config.group_size} does not fit into the trainer's batch of {batch_size} sequences"
            if batch_size > 0
            else "neither the rollout server nor --env.batch-size says how many sequences a batch has"
        )
    total_steps = joined.num_steps if env.config.total_steps == -1 else env.config.total_steps
    if total_steps == -1:
        raise BadRequest("neither the rollout server nor --env.total-steps says how many steps there are")
    env.config.batch_size, env.config.total_steps = batch_size, total_steps
    workers = max_workers(env.config, len(env.server_configs))
    terms = PaceTerms(env.config, batch_size, workers, total_steps, joined.checkpoint_interval)
    return terms, max_token_len if max_token_len > 0 else None


async def _register(env: Environment, server: RolloutServer) -> EnvRegistered:
    return await server.register_env(
        EnvRegistration(
            max_token_length=env.config.max_token_length,
            desired_name=env.name,
            weight=env.config.inference_weight,
            min_batch_allocation=env.config.min_batch_allocation,
            group_size=env.config.group_size,
        )
    )
