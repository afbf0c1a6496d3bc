"""Builds each process from its settings: one function per command. The only module that imports all rooms.

What imports Ray is imported inside the functions that use it: a gateway does not, and Ray takes much memory.
"""

import asyncio
import gc
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import uvicorn
from fastapi import FastAPI

from stepwell import logs
from stepwell.access.access_keys import AccessKeys
from stepwell.access.audit_log import AuditLog
from stepwell.access.caller import SessionKey
from stepwell.access.key_file import KeyFile
from stepwell.atropos.app import AtroposAsgi, create_atropos
from stepwell.common import listening
from stepwell.common.bounded_http import MOST_CONNECTIONS, BoundedHttp
from stepwell.common.die_with_parent import set_parent_death_signal
from stepwell.common.listening import ServedHosts
from stepwell.common.optional import require
from stepwell.common.tokenizers import BackgroundTokenizer, LoadedTokenizer, OnDemandTokenizer, load_decode
from stepwell.common.worker_processes import CANNOT_START, WorkerProcesses
from stepwell.config.exports import ExportSettings, ImportSettings
from stepwell.config.pool import PoolSettings
from stepwell.config.rewards import FunctionSection, RescoreSettings, RewardSettings, TrySettings
from stepwell.config.sections import DNS, PoolSection, ServerSection
from stepwell.config.serving import ON_POLICY, AtroposSettings, DashboardSettings, GatewaySettings, SessionKeySettings
from stepwell.dashboard.app import create_dashboard
from stepwell.dashboard.gateway_monitor import GatewayMonitor
from stepwell.dashboard.login.people import ListedPeople
from stepwell.engines.discovery import EngineDiscovery
from stepwell.engines.fleet import EngineFleet
from stepwell.engines.shared_watch import SharedWatch
from stepwell.errors import NotReady, StepwellError
from stepwell.exports import commands as exporting
from stepwell.gateway.app import create_app
from stepwell.gateway.bridge.thinking import ThinkingPolicy
from stepwell.gateway.dialects.request_fields import RequestRules
from stepwell.gateway.dialects.request_sampling import SamplingPolicy
from stepwell.gateway.http.quotas import CallQuota
from stepwell.gateway.recording.redaction_child import load_redaction
from stepwell.gateway.recording.redactor import Redactor
from stepwell.gateway.recording.spool import Spool
from stepwell.gateway.routes.asgi import GatewayAsgi
from stepwell.pool.api.plan import JournalSync, PoolPlan
from stepwell.pool.client import PoolClient
from stepwell.pool.client.link import LinkClient, RayLink, SharedLink
from stepwell.pool.client.pool_keeper import keep_pool
from stepwell.pool.client.ray_cluster import join_ray
from stepwell.rewards.client import RewardClient
from stepwell.rewards.confinement.sandbox import SandboxLevel
from stepwell.rewards.offline import rescore, try_function
from stepwell.rewards.sandbox.messages import Job
from stepwell.steps.parquet import ParquetReader

if TYPE_CHECKING:
    from stepwell.dashboard.login.oidc import OidcLogin

log = logging.getLogger("stepwell")

ServerSettings: TypeAlias = GatewaySettings | AtroposSettings | DashboardSettings

OIDC_SECRET = "STEPWELL_DASHBOARD_OIDC_CLIENT_SECRET"
"""No setting: as a flag, other users could read it."""
TLS_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""For TLS 1.2; those of TLS 1.3 are all as good."""
BACKLOG = 2048
"""Connections that wait to be accepted."""
GC_THRESHOLD = (50_000, 20, 50)
"""A call makes about a thousand small objects, nearly all without cycles; so cycles are searched for less often."""
IDLE_CONNECTION_TIMEOUT = 75
"""Seconds; longer than the 60 of common load balancers and HTTP clients, so that they close first: a server that does
may do so while the next request is on its way."""


def run_gateway(settings: GatewaySettings) -> None:
    """Serves until a signal ends it, also while Ray is away."""
    _check_listening(settings)
    if settings.workers > 1:
        asyncio.run(_run_workers(settings))
        return
    link = RayLink(settings.ray_address, settings.ray_namespace)
    link.start()
    _serve("gateway", _gateway(settings, link), settings)


async def _run_workers(settings: GatewaySettings) -> None:
    """This process keeps the workers and their link to Ray running; it serves nothing itself."""
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(prefix="stepwell-") as folder,
        _listening(settings.host, settings.port) as shared,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
    ):
        path = str(Path(folder) / "link")
        listener.bind(path)
        listener.listen()
        link = RayLink(settings.ray_address, settings.ray_namespace, listener=listener)
        await asyncio.to_thread(link.start)
        link.keep_running()
        log.info("gateway on %s, %d workers", _url(settings), settings.workers)

        def make(number: int) -> BaseProcess:
            return spawn.Process(target=_run_worker, args=(settings, number, path, shared, os.getpid()))

        try:
            await WorkerProcesses(settings.workers, make).run()
        finally:
            await link.close()


def _run_worker(settings: GatewaySettings, number: int, path: str, shared: socket.socket, parent: int) -> None:
    """A process of its own. It ends, and first delivers its steps, when its parent ends."""
    set_parent_death_signal(parent, signal.SIGTERM)
    logs.setup(json=os.environ.get("STEPWELL_LOG") == "json")
    settings = settings.of_worker(number)
    link = SharedLink(path)
    try:
        link.start()
        app, own = _gateway(settings, link, Path(path).with_name("engines")), _listening(settings.host, settings.port)
    except StepwellError as failure:
        log.error("worker %d: %s", number, failure)
        sys.exit(CANNOT_START)
    _serve(f"worker {number} of the gateway", app, settings, (shared, own))


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as failure:
        raise NotReady(f"cannot listen on {host}:{port}: {failure.strerror}") from None


def _gateway(settings: GatewaySettings, link: LinkClient, watch: Path | None = None) -> GatewayAsgi:
    """With `watch`, a socket file, all processes that share it have one watcher of engines."""
    keys, audit, hosts = _keys(settings), _audit(settings), _hosts(settings)
    worker = settings.reward_worker_name
    pool = partial(PoolClient, settings.data_pool_name, settings.ray_namespace, transport=link)
    names = [address for address in settings.vllm_addresses if address.startswith(DNS)]
    addresses = [address for address in settings.vllm_addresses if address not in names]
    engines = EngineFleet(addresses, routing=settings.routing, api_key=settings.engine_key)
    return create_app(
        pool=pool(),
        link=link,
        engines=engines,
        watch=SharedWatch(watch, engines).run if watch else None,
        discoveries=[EngineDiscovery(name, engines) for name in names],
        tokenizer=BackgroundTokenizer(settings.tokenizer_path, OnDemandTokenizer.load),
        rewards=RewardClient(worker, settings.ray_namespace, link) if worker else None,
        prompt_length=settings.prompt_length,
        response_length=settings.response_length,
        keys=keys,
        audit=audit,
        spool=Spool(Path(settings.spool), settings.spool_bytes) if settings.spool else None,
        is_durable=settings.durability == "sync",
        sampling={
            channel: SamplingPolicy(on_policy=mode == ON_POLICY, temperature=settings.temperature)
            for channel, mode in (choice.split("=") for choice in settings.sampling)
        },
        trained_model=settings.model,
        other_models=settings.other_models,
        answers_unchecked=settings.unchecked_calls == "answer",
        bridge=ThinkingPolicy(settings.thinking) if settings.bridge == "on" else None,
        session_sample=settings.session_sample,
        rules=RequestRules(frozenset(settings.forward_fields), frozenset(settings.media_hosts)),
        quota=CallQuota.read(settings.quota),
        redactor=_redactor(settings),
        atropos=_atropos(pool(), keys, audit, settings.atropos_state, hosts) if settings.atropos else None,
        hosts=hosts,
    )


def _redactor(settings: GatewaySettings) -> Redactor | None:
    """A function that cannot be loaded is refused at once."""
    if settings.redact is None:
        return None
    load_redaction(settings.redact)
    return Redactor(settings.redact, settings.tokenizer_path)


def run_gateway_key(settings: SessionKeySettings) -> None:
    keys = AccessKeys(settings.control_keys)
    _say(keys.session_key(SessionKey(settings.user, settings.capture == "on")))


def run_atropos(settings: AtroposSettings) -> None:
    """Serves until a signal ends it."""
    _check_listening(settings)
    keys, audit = _keys(settings), _audit(settings)
    app = _atropos(_join_pool(settings), keys, audit, settings.state, _hosts(settings))
    _serve("Atropos server", app, settings)


def _atropos(
    pool: PoolClient, keys: AccessKeys, audit: AuditLog | None, state: str | None, hosts: ServedHosts | None
) -> AtroposAsgi:
    return create_atropos(pool=pool, keys=keys, audit=audit, state=Path(state) if state else None, hosts=hosts)


def run_dashboard(settings: DashboardSettings) -> None:
    """Serves until a signal ends it."""
    _check_listening(settings)
    keys = _keys(settings)
    login = _login(settings, keys)
    plan = asyncio.run(_join_pool(settings).shards.plan())
    path = settings.tokenizer_path
    app = create_dashboard(
        pool=_join_pool(settings),  # another one: a client belongs to one event loop
        keys=keys,
        audit=_audit(settings),
        plan=plan,
        tokenizer=BackgroundTokenizer(path, LoadedTokenizer.load) if path else None,
        gateways=GatewayMonitor(settings.gateways, settings.control_keys[0] if settings.control_keys else None),
        hosts=_hosts(settings),
        login=login,
    )
    _serve("dashboard", app, settings)


def _login(settings: DashboardSettings, keys: AccessKeys) -> "OidcLogin | None":
    """BadRequest if people are to log in and the extra `oidc` is not installed."""
    if settings.oidc_issuer is None or settings.oidc_client_id is None:
        return None
    require("authlib.integrations.starlette_client", "oidc", purpose="--oidc-issuer")
    from stepwell.dashboard.login.oidc import OidcClient, OidcLogin

    client = OidcClient(settings.oidc_issuer, settings.oidc_client_id, os.environ.get(OIDC_SECRET) or None)
    people = ListedPeople(settings.oidc_viewers, settings.oidc_curators)
    return OidcLogin(client, people, keys, public_url=settings.public_url)


def _check_listening(settings: ServerSettings) -> None:
    """Before anything is started."""
    variable = f"{settings.model_config.get('env_prefix')}CONTROL_KEYS"
    listening.require_safe_address(
        settings.host, has_keys=bool(settings.control_keys), insecure=settings.insecure, variable=variable
    )
    if not settings.control_keys and not listening.is_loopback(settings.host):
        log.warning("listening on %s without keys: access is open to everyone", settings.host)
    if (
        settings.tls_cert
        and settings.tls_key
        and (why := listening.check_certificate(settings.tls_cert, settings.tls_key))
    ):
        log.warning("%s", why)


def _hosts(settings: ServerSettings) -> ServedHosts | None:
    return listening.served_hosts(settings.host, settings.allowed_hosts, has_keys=bool(settings.control_keys))


def _url(settings: ServerSettings) -> str:
    return f"{settings.scheme}://{settings.host}:{settings.port}"


def _keys(settings: ServerSection) -> AccessKeys:
    return AccessKeys(settings.control_keys, KeyFile(Path(settings.keys_file)) if settings.keys_file else None)


def _audit(settings: ServerSection) -> AuditLog | None:
    return AuditLog(Path(settings.audit_log)) if settings.audit_log else None


def _serve(
    name: str,
    app: GatewayAsgi | AtroposAsgi | FastAPI,
    settings: ServerSettings,
    sockets: Sequence[socket.socket] = (),
) -> None:
    """On its host and port, unless sockets are given that listen already."""
    log.info("%s on %s", name, _url(settings))
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLD)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        timeout_keep_alive=IDLE_CONNECTION_TIMEOUT,
        http=BoundedHttp,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        ssl_ciphers=TLS_CIPHERS,
        limit_concurrency=MOST_CONNECTIONS,
        log_config=None,
        log_level="warning",
        access_log=False,
    )
    uvicorn.Server(config).run(sockets=list(sockets) or None)


def _join_pool(settings: PoolSection | RewardSettings) -> PoolClient:
    join_ray(settings.ray_address, settings.ray_namespace)
    return PoolClient(settings.data_pool_name, settings.ray_namespace)


def run_pool(settings: PoolSettings) -> None:
    """Creates the DataPool or finds it; Ray keeps it running. With --keep, creates it again if Ray has lost it."""
    if settings.keep:
        asyncio.run(_keep_pool(settings))
    else:
        _create_pool(settings)


async def _keep_pool(settings: PoolSettings) -> None:
    link = RayLink(settings.ray_address, settings.ray_namespace)
    link.start()

    async def create(*, changes_shards: bool = False) -> None:
        """In a process of its own, because a process that has joined Ray ends with Ray's head."""
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=_create_pool, args=(settings,), kwargs={"changes_shards": changes_shards})
        process.start()
        await asyncio.to_thread(process.join)

    if link.is_joined:
        await create(changes_shards=True)
    await keep_pool(link, settings.name, create)


def _pool_plan(settings: PoolSettings) -> PoolPlan:
    return PoolPlan(
        name=settings.name,
        shards=settings.shards,
        limits=settings.limits(),
        journal=settings.resolved_journal(),
        sync=JournalSync(settings.sync),
        min_free_bytes=settings.min_free_bytes,
        archive=settings.archive,
        resource=settings.resource,
    )


def _create_pool(settings: PoolSettings, *, changes_shards: bool = True) -> None:
    """A pool that was created before has as many shards as before, unless a number is given that it is to have."""
    from stepwell.pool.shard.actor import reshard_pool, start_pool

    join_ray(settings.ray_address, settings.ray_namespace)
    plan = _pool_plan(settings)
    in_force = start_pool(plan, settings.ray_namespace, new_journals=settings.new_journals)
    if changes_shards and "shards" in settings.model_fields_set and in_force.shards != plan.shards:
        log.info("DataPool %r has %d shards, and gets %d", plan.name, in_force.shards, plan.shards)
        in_force = reshard_pool(plan.name, plan.shards, settings.ray_namespace)
    if in_force != plan:
        shown = replace(in_force, journal=in_force.journal_name)
        log.warning("DataPool %r runs already with other settings, which are kept: %s", plan.name, shown)
    log.info("DataPool %r is up in Ray namespace %r", settings.name, settings.ray_namespace)


def run_rewards(settings: RewardSettings) -> None:
    """Starts the reward workers or finds them; Ray keeps them running."""
    from stepwell.rewards.worker import RewardPlan, start_rewards

    if not asyncio.run(_join_pool(settings).shards.plan()).limits.require_reward:
        log.warning("DataPool %r does not require rewards, so it offers nothing to score", settings.data_pool_name)
    job = _job(settings.function, settings)
    plan = RewardPlan(name=settings.name, workers=settings.workers, cpus=settings.cpus, job=job)
    pool_client = partial(PoolClient, settings.data_pool_name, settings.ray_namespace)
    in_force = start_rewards(plan, pool_client, settings.ray_namespace)
    if in_force != plan:
        log.warning("reward worker %r runs already with other settings, which are kept: %s", plan.name, in_force)
    log.info(
        "%d reward workers are up in Ray namespace %r; generated code runs in a sandbox of level %s",
        *(in_force.workers, settings.ray_namespace, in_force.job.sandbox),
    )


def run_try(settings: TrySettings) -> None:
    job = _job(settings.function, settings)
    asyncio.run(try_function(job, ParquetReader(settings.on), limit=settings.limit, say=_say))


def run_rescore(settings: RescoreSettings) -> None:
    job = _job(settings.function, settings)
    asyncio.run(rescore(job, ParquetReader(settings.from_), settings.to, say=_say))


def run_export(settings: ExportSettings) -> None:
    pool = _join_pool(settings) if settings.from_ is None else None
    decode = None if settings.tokenizer_path is None else load_decode(settings.tokenizer_path)
    asyncio.run(exporting.run_export(settings, pool, decode, _say))


def run_import(settings: ImportSettings) -> None:
    asyncio.run(exporting.run_import(settings, _join_pool(settings), _say))


def _job(function: str, settings: FunctionSection) -> Job:
    """The settings have the same names in both."""
    same = settings.model_dump(include=set(FunctionSection.model_fields) - {"sandbox"})
    return Job(function=function, folder=str(Path.cwd()), sandbox=SandboxLevel(settings.sandbox), **same)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
