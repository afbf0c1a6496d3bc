"""An environment's life, from setup to its end: in the service of a trainer, to write groups, or to evaluate once."""

import asyncio
import logging
from collections.abc import Mapping

from stepwell.envs.base import BaseEnv
from stepwell.envs.checkpoints import claim
from stepwell.envs.loop.delivery import Delivery
from stepwell.envs.loop.group_tasks import Work
from stepwell.envs.loop.membership import Membership, agree, join
from stepwell.envs.loop.process_loop import Processing
from stepwell.envs.loop.progress import Show, Silence, Sink
from stepwell.envs.loop.serve_loop import Serving
from stepwell.envs.loop.stop_signal import Stop, stop_by_signal, unless
from stepwell.envs.output.wandb_tracker import Run
from stepwell.envs.rollout_server.client import RolloutServer

log = logging.getLogger("stepwell.envs")


async def serve(env: BaseEnv, show: Show | None = None) -> None:
    """Until the training is over, there are no more items, or a signal says so."""
    with stop_by_signal() as stop:
        try:
            await env.setup()
            async with RolloutServer(env.config.rollout_server_url, env.config.rollout_server_key) as server:
                membership = await unless(stop.asked, join(env, server))
                if membership is not None:
                    await _serve(env, server, membership, show or Silence(), stop)
        finally:
            await _close(env)


async def process(env: BaseEnv, groups: int, sink: Sink, show: Show | None = None) -> int:
    """Write so many groups to `sink`, with no rollout server; gives how many were written."""
    with stop_by_signal() as stop:
        try:
            await env.setup()
            return await Processing(env, groups, sink, show or Silence(), stop).run()
        finally:
            await _close(env)


async def evaluate(env: BaseEnv, show: Show | None = None) -> Mapping[str, float]:
    """Evaluate once, with no rollout server; gives what env.evaluate() gave."""
    with stop_by_signal() as stop:
        try:
            await env.setup()
            return await unless(stop.asked, env.evaluate()) or {}
        finally:
            await _close(env)


async def _serve(env: BaseEnv, server: RolloutServer, membership: Membership, show: Show, stop: Stop) -> None:
    known = membership.known
    terms, max_length = await agree(env, server, known)
    env.curr_step = known.starting_step
    env.checkpoints = claim(known.checkpoint_dir, known.wandb_name, env.name, known.starting_step)
    if known.starting_step > 0:
        env.load_checkpoint()
    await _start_tracking(env, server, known.wandb_name)
    work = Work(env, Delivery(env, membership.send, max_length=max_length).deliver)
    serving = Serving(env, membership, terms, work, show, stop)
    try:
        log.info("the work is over: %s", await serving.run())
    except asyncio.CancelledError:
        stop.hurry()
        raise
    finally:
        await serving.end()
        await membership.leave()


async def _start_tracking(env: BaseEnv, server: RolloutServer, name: str) -> None:
    if env.config.use_wandb:
        project, group = await server.wandb_info()
        config = env.config.model_dump(mode="json", exclude={"rollout_server_key"})
        env.wandb.start(Run(name, project, group, config), lambda ids: str(env.tokenizer.decode(ids)))


async def _close(env: BaseEnv) -> None:
    await env.wandb.close()
    await env.server.close()
    if env.checkpoints is not None:
        env.checkpoints.close()
