"""A process that serves agents: the gateway, built from its settings."""

import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from stepwell.common.tokenizers import BackgroundTokenizer, OnDemandTokenizer
from stepwell.config.sections import DNS
from stepwell.config.serving import ALL_ON_POLICY, AS_ASKED, GatewaySettings
from stepwell.engines.discovery import EngineDiscovery
from stepwell.engines.fleet import EngineFleet
from stepwell.engines.shared_watch import SharedWatch
from stepwell.gateway.app import create_app
from stepwell.gateway.bridge.thinking import ThinkingPolicy
from stepwell.gateway.dialects.request_fields import RequestRules
from stepwell.gateway.dialects.request_sampling import SamplingPolicy
from stepwell.gateway.http.quotas import CallQuota
from stepwell.gateway.recording.redaction_child import load_redaction
from stepwell.gateway.recording.redactor import Redactor
from stepwell.gateway.recording.spool import Spool
from stepwell.gateway.routes.asgi import GatewayAsgi
from stepwell.pool.client import PoolClient
from stepwell.pool.client.link import LinkClient
from stepwell.rewards.client import RewardClient
from stepwell.wiring.atropos import atropos_app
from stepwell.wiring.http_server import serve
from stepwell.wiring.server_settings import audit_of, hosts_of, keys_of


def serve_gateway(
    name: str,
    settings: GatewaySettings,
    link: LinkClient,
    watch: Path | None = None,
    sockets: Sequence[socket.socket] = (),
) -> None:
    """Until a signal ends it."""
    serve(name, gateway_app(settings, link, watch), settings, sockets)


def gateway_app(settings: GatewaySettings, link: LinkClient, watch: Path | None = None) -> GatewayAsgi:
    """With `watch`, a socket file, all processes that share it have one watcher of engines."""
    keys, audit, hosts = keys_of(settings), audit_of(settings), hosts_of(settings)
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
            channel: SamplingPolicy(mode != AS_ASKED, settings.temperature, of_sessions=mode == ALL_ON_POLICY)
            for channel, mode in (choice.split("=") for choice in settings.sampling)
        },
        trained_model=settings.model,
        other_models=settings.other_models,
        marked_side_calls=settings.marked_side_calls,
        answers_unchecked=settings.unchecked_calls == "answer",
        bridge=ThinkingPolicy(settings.thinking) if settings.bridge == "on" else None,
        session_sample=settings.session_sample,
        rules=RequestRules(
            frozenset(settings.forward_fields),
            frozenset(settings.media_hosts),
            calls_as_text=settings.tool_calls == "text",
        ),
        quota=CallQuota.read(settings.quota),
        redactor=_redactor(settings),
        atropos=atropos_app(pool(), keys, audit, settings.atropos_state, hosts) if settings.atropos else None,
        hosts=hosts,
    )


def _redactor(settings: GatewaySettings) -> Redactor | None:
    """A function that cannot be loaded is refused at once."""
    if settings.redact is None:
        return None
    load_redaction(settings.redact)
    return Redactor(settings.redact, settings.tokenizer_path)
