"""Where the rooms meet: the only file that knows them all. Each function builds one process from its settings."""

import gc
import logging
from pathlib import Path

import uvicorn

from stepwell.config import GatewaySettings, PoolSettings
from stepwell.gateway.app import create_app
from stepwell.gateway.engines import Engines
from stepwell.gateway.keys import Keys
from stepwell.gateway.spool import Spool
from stepwell.gateway.tokenizer import BackgroundTokenizer, load_tokenizer
from stepwell.pool.actor import PoolPlan, start_pool
from stepwell.pool.client import PoolClient
from stepwell.pool.cluster import join_ray
from stepwell.rewards.client import RewardClient

log = logging.getLogger("stepwell")

LOOPBACK = ("127.0.0.1", "localhost", "::1")
GC_THRESHOLD = (50_000, 20, 50)
"""A gateway makes a thousand small objects a call, nearly all without cycles: looking for cycles each time is waste."""


def run_gateway(settings: GatewaySettings) -> None:
    """Serve until told to stop."""
    keys = Keys(settings.control_keys)
    join_ray(settings.ray_address, settings.ray_namespace)
    worker = settings.reward_worker_name
    app = create_app(
        pool=PoolClient(settings.data_pool_name, settings.ray_namespace),
        engines=Engines(settings.vllm_addresses, routing=settings.routing, api_key=settings.engine_key),
        tokenizer=BackgroundTokenizer(settings.tokenizer_path, load_tokenizer),
        rewards=RewardClient(worker, settings.ray_namespace) if worker else None,
        prompt_length=settings.prompt_length,
        response_length=settings.response_length,
        keys=keys,
        spool=Spool(Path(settings.spool)) if settings.spool else None,
        is_durable=settings.durability == "sync",
    )
    if keys.open and settings.host not in LOOPBACK:
        log.warning("listening on %s without keys: everyone who can reach it can use it", settings.host)
    log.info("gateway on http://%s:%d", settings.host, settings.port)
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLD)
    uvicorn.run(app, host=settings.host, port=settings.port, log_config=None, log_level="warning", access_log=False)


def run_pool(settings: PoolSettings) -> None:
    """Create the DataPool, or find it, and leave it to Ray."""
    join_ray(settings.ray_address, settings.ray_namespace)
    plan = PoolPlan(
        name=settings.name,
        shards=settings.shards,
        limits=settings.limits(),
        journal=settings.journal and str(Path(settings.journal).resolve()),
        archive=settings.archive,
    )
    in_force = start_pool(plan, settings.ray_namespace)
    if in_force != plan:
        log.warning("DataPool %r was there already, with other settings, which stay: %s", plan.name, in_force)
    log.info("DataPool %r is up in Ray namespace %r", settings.name, settings.ray_namespace)
