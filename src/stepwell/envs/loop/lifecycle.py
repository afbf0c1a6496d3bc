"""An environment's lifecycle, from setup to close: serve a trainer, write groups, or evaluate once."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from stepwell.envs.environment import Environment, claim
from stepwell.envs.loop.group_tasks import GroupTasks, StopSignal, stop_by_signal, unless
from stepwell.envs.loop.progress import GroupSink, NoView, ProgressView
from stepwell.envs.loop.serve_loop import Membership, ServeLoop, agree, join
from stepwell.envs.rollout_server import RolloutServer

log = logging.getLogger("stepwell.envs")


async def serve(env: Environment, view: ProgressView | None = None) -> None:
    """Serves until the training is over, there are no more items, or a signal arrives."""
    rollout_server = RolloutServer(env.config.rollout_server_url, env.config.rollout_server_key)
    async with _set_up(env) as stop, rollout_server as server:
        membership = await unless(stop.requested, join(env, server))
        if membership is not None:
            await _serve(env, server, membership, view or NoView(), stop)


async def process(env: Environment, groups: int, sink: GroupSink, view: ProgressView | None = None) -> int:
    """Writes so many groups to `sink`, without a rollout server; returns how many were written."""
    env.process_mode = True
    async with _set_up(env) as stop:
        _start_tracking(env, job_type="process", name=env.name)
        return await ProcessLoop(env, groups, sink, view or NoView(), stop).run()


async def evaluate(env: Environment) -> Mapping[str, float]:
    """Evaluates once, without a rollout server; returns the result of env.evaluate()."""
    async with _set_up(env) as stop:
        _start_tracking(env, job_type="evaluate", name=env.name)
        metrics = await unless(stop.requested, env.evaluate_to_end()) or {}
        if env.wandb.is_on:
            with env.failure_count.catching("wandb_log"):
                await env.wandb_log(metrics)
        return metrics


@asynccontextmanager
async def _set_up(env: Environment) -> AsyncIterator[StopSignal]:
    """Around a run: setup before it, close after it, and the signals that stop it."""
    with stop_by_signal() as stop:
        try:
            await env.setup()
            yield stop
        finally:
            await env.wandb.close()
            await env.close_servers()
            if env.checkpoints is not None:
                env.checkpoints.close()


async def _serve(
    env: Environment, server: RolloutServer, membership: Membership, view: ProgressView, stop: StopSignal
) -> None:
    joined = membership.joined
    terms, max_length = await agree(env, server, joined)
    env.curr_step, env.wandb_prepend, env.env_id = joined.starting_step, joined.wandb_name, joined.env_id
    env.checkpoint_dir, env.checkpoint_interval = joined.checkpoint_dir, joined.checkpoint_interval
    env.max_token_len = -1 if max_length is None else max_length
    env.checkpoints = claim(joined.checkpoint_dir, joined.wandb_name, env.name, joined.starting_step)
    if joined.starting_step > 0:
        env.load_checkpoint()
    if env.config.use_wandb:
        env.wandb_project, env.wandb_group = await server.wandb_info()
        _start_tracking(env, name=joined.wandb_name, project=env.wandb_project, group=env.wandb_group)
    tasks = GroupTasks(env, membership.send, max_length=max_length)
    loop = ServeLoop(env, membership, terms, tasks, view, stop)
    try:
        log.info("the run has ended: %s", await loop.run())
    except asyncio.CancelledError:
        stop.stop_now()
        raise
    finally:
        await loop.end()
        await membership.leave()


def _start_tracking(env: Environment, **run: str | None) -> None:
    """`run` are arguments of wandb.init. Settings that the environment does not know may be secret and are left out."""
    if env.config.use_wandb:
        known = set(type(env.config).model_fields) - {"rollout_server_key"}
        env.wandb.start({**run, "config": env.config.model_dump(mode="json", include=known)})
