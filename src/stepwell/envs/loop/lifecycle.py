"""An environment's lifecycle, from setup to close: serve a trainer, write groups, or evaluate once."""

import asyncio
import logging
from collections.abc import Mapping

from stepwell.envs.checkpoints import claim
from stepwell.envs.environment import RunnableEnv
from stepwell.envs.loop.group_tasks import GroupTasks
from stepwell.envs.loop.membership import Membership, agree, join
from stepwell.envs.loop.process_loop import ProcessLoop
from stepwell.envs.loop.progress import GroupSink, NoView, ProgressView
from stepwell.envs.loop.serve_loop import ServeLoop
from stepwell.envs.loop.stop_signal import StopSignal, stop_by_signal, unless
from stepwell.envs.rollout_server import RolloutServer

log = logging.getLogger("stepwell.envs")


async def serve(env: RunnableEnv, view: ProgressView | None = None) -> None:
    """Until the training is over, there are no more items, or a signal arrives."""
    with stop_by_signal() as stop:
        try:
            await env.setup()
            async with RolloutServer(env.config.rollout_server_url, env.config.rollout_server_key) as server:
                membership = await unless(stop.requested, join(env, server))
                if membership is not None:
                    await _serve(env, server, membership, view or NoView(), stop)
        finally:
            await _close(env)


async def process(env: RunnableEnv, groups: int, sink: GroupSink, view: ProgressView | None = None) -> int:
    """Writes so many groups to `sink`, without a rollout server; returns how many were written."""
    with stop_by_signal() as stop:
        try:
            await env.setup()
            return await ProcessLoop(env, groups, sink, view or NoView(), stop).run()
        finally:
            await _close(env)


async def evaluate(env: RunnableEnv, view: ProgressView | None = None) -> Mapping[str, float]:
    """Evaluates once, without a rollout server; returns the result of env.evaluate()."""
    with stop_by_signal() as stop:
        try:
            await env.setup()
            return await unless(stop.requested, env.evaluate()) or {}
        finally:
            await _close(env)


async def _serve(
    env: RunnableEnv, server: RolloutServer, membership: Membership, view: ProgressView, stop: StopSignal
) -> None:
    joined = membership.joined
    terms, max_length = await agree(env, server, joined)
    env.curr_step = joined.starting_step
    env.checkpoints = claim(joined.checkpoint_dir, joined.wandb_name, env.name, joined.starting_step)
    if joined.starting_step > 0:
        env.load_checkpoint()
    await _start_tracking(env, server, joined.wandb_name)
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


async def _start_tracking(env: RunnableEnv, server: RolloutServer, name: str) -> None:
    if env.config.use_wandb:
        project, group = await server.wandb_info()
        config = env.config.model_dump(mode="json", exclude={"rollout_server_key"})
        run = {"name": name, "project": project, "group": group, "config": config}
        env.wandb.start(run, lambda ids: str(env.tokenizer.decode(ids)))


async def _close(env: RunnableEnv) -> None:
    await env.wandb.close()
    await env.server.close()
    if env.checkpoints is not None:
        env.checkpoints.close()
