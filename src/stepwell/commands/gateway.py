"""`stepwell gateway`: one process that serves, or one that keeps several workers and their link to Ray running.

The latter serves nothing itself and imports nothing that serves, which is three quarters of a worker's memory.
"""

import asyncio
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from stepwell import logs
from stepwell.commands.atropos import atropos_app
from stepwell.commands.sections import (
    DNS,
    EngineAddresses,
    Listed,
    Port,
    ServerSection,
    audit_of,
    check_listening,
    hosts_of,
    keys_of,
    listening_socket,
    network_link,
    serve,
)
from stepwell.common.own_process import set_parent_death_signal
from stepwell.common.processes import CANNOT_START, WorkerProcesses
from stepwell.errors import StepwellError

if TYPE_CHECKING:
    from stepwell.gateway.asgi import GatewayAsgi
    from stepwell.gateway.dialects.request_rules import RequestRules, SamplingPolicy
    from stepwell.gateway.recording.redaction import Redactor
    from stepwell.pool.client.link import LinkClient

log = logging.getLogger("stepwell")

SAMPLING_MODES = AS_ASKED, ON_POLICY, ALL_ON_POLICY = "as_asked", "on_policy", "all_on_policy"


def _are_choices(value: tuple[str, ...]) -> tuple[str, ...]:
    for choice in value:
        channel, _, mode = choice.partition("=")
        if not channel or mode not in SAMPLING_MODES:
            modes = " or ".join(f"CHANNEL={mode}" for mode in SAMPLING_MODES)
            raise ValueError(f"{choice!r} is not {modes}")
    return value


SamplingChoices = Annotated[Listed, AfterValidator(_are_choices)]


class GatewaySettings(ServerSection, env_prefix="STEPWELL_GATEWAY_"):
    """Serve agents as an OpenAI-compatible API, and record every call as a step in the DataPool."""

    examples = (
        "stepwell gateway --data-pool-name data_pool --vllm-addresses http://10.0.0.7:8001,http://10.0.0.8:8001 \\\n"
        "    --tokenizer-path Qwen/Qwen3-0.6B --prompt-length 8192 --response-length 2048 --spool spool",
    )

    data_pool_name: str
    """Name of the DataPool's Ray actor."""
    vllm_addresses: EngineAddresses
    """Addresses of the vLLM servers, separated by commas; --routing chooses between them. dns://host:port stands for
    all addresses that DNS lists for the host, at any time."""
    tokenizer_path: str
    """Folder or name of the Hugging Face tokenizer. It decodes text for rewards; recording does not use it."""
    prompt_length: int = Field(ge=1)
    """Longest prompt, in tokens, that the trainer accepts; a longer one is answered, and its step is quarantined."""
    response_length: int = Field(ge=1)
    """Longest response, in tokens; no engine is asked for more."""
    reward_worker_name: str | None = None
    """Name of the reward worker's Ray actor, if there is one."""
    engine_key: str | None = None
    """API key that the engines require."""
    routing: Literal["round_robin", "least_busy", "sticky"] = "round_robin"
    """Which engine gets a call: round_robin, least_busy, or sticky (always the same one for a trajectory)."""
    durability: Literal["async", "sync"] = "async"
    """async answers at once; sync answers only after the pool has confirmed the step."""
    unchecked_calls: Literal["answer", "refuse"] = "answer"
    """A call whose trajectory the pool cannot confirm, because it is away: answer it and let the pool decide about its
    step later, or refuse it."""
    sampling: SamplingChoices = ("train=on_policy",)
    """Whose sampling parameters count, by channel, as CHANNEL=as_asked, CHANNEL=on_policy or CHANNEL=all_on_policy,
    separated by commas. With on_policy, the trainer's temperature replaces the agent's in rollouts, and truncation,
    penalties and strict tools are off; with all_on_policy, in live users' sessions too. Other calls are sampled as the
    agent asks."""
    temperature: float = Field(default=1.0, ge=0.01)
    """The trainer's temperature, at which on_policy channels are sampled. vLLM samples at 0.01 in place of smaller
    ones."""
    model: str = ""
    """The model or adapter that is trained, and that agents may ask for; without it, the engines' first one."""
    other_models: Listed = ()
    """Further models or adapters that agents may ask for, separated by commas; their steps are left out of training."""
    marked_side_calls: Listed = ()
    """Channels in which only the header x-stepwell-call of a control key makes a side call, separated by commas. In the
    others, the known prompts of harnesses do too: an agent that writes such a prompt keeps its step out of training."""
    forward_fields: Listed = ()
    """Fields of chat and completion requests that engines get beside the usual ones, separated by commas, such as
    structured_outputs; others are removed."""
    quota: Listed = ()
    """The most that one trajectory, or the user of a session key in all sessions, may use at a time, as NAME=NUMBER,
    separated by commas: in_flight calls (512), bytes of their requests (134217728), and calls per_second and
    tokens_per_second (0: any)."""
    tool_calls: Literal["parsed", "text"] = "parsed"
    """How chat clients get the model's tool calls: parsed by the engine, or as the model writes them in the text of its
    message, for agents that parse them by themselves."""
    media_hosts: Listed = ()
    """Hosts from which engines may fetch the images that a request names, over https, separated by commas; without any,
    an image must be in the request."""
    bridge: Literal["on", "off"] = "on"
    """on sends a call that continues a recorded conversation to the engine as exact token ids, so that the turns of a
    rollout are trained as one sequence; off lets the engine render every prompt from its messages."""
    thinking: Literal["template", "tool_cycle", "all"] = "template"
    """The part of its own earlier thinking that the model sees over a bridge: what the chat template shows, all of it
    until the user's next message, or all of it."""
    session_sample: float = Field(default=1.0, ge=0, le=1)
    """Share of sessions that are recorded; the same ones at every gateway with the same share."""
    redact: str | None = None
    """Function that finds what must not be stored, as module:function or path/to/file.py:function. It gets a text and
    returns spans (start, end); their tokens are masked in what is stored, and not trained. Answers stay as they are."""
    spool: str | None = None
    """File in which steps wait for the pool, so that they survive this process; without it, they wait in memory."""
    spool_bytes: int = Field(default=16 * 2**30, ge=2**20)
    """Most bytes of steps in the spool; beyond that, the oldest are given up and counted."""
    atropos: bool = False
    """Serve the Atropos-compatible API too, below /atropos."""
    atropos_state: str | None = None
    """File that keeps the registrations and step count of the Atropos-compatible API across restarts."""
    port: Port = 8100
    workers: int = Field(default=1, ge=1, le=256)
    """Processes that serve this port, with one link to Ray for all. Each also listens on a port of its own, the next
    ones after --port, for /metrics; and each has its own spool and audit log, FILE, FILE-1 and so on."""

    @model_validator(mode="after")
    def _check_reward_worker(self) -> Self:
        if self.link is not None and self.reward_worker_name is not None:
            raise ValueError(
                "--reward-worker-name needs Ray, because reward workers are its actors, and a link leads to the pool "
                "only: leave it out (`stepwell rewards` scores what is in the pool), or run the gateway on a machine "
                "of the Ray cluster"
            )
        return self

    @model_validator(mode="after")
    def _check_workers(self) -> Self:
        if self.workers > 1 and self.atropos:
            raise ValueError("--atropos needs one process; with --workers, start `stepwell atropos` besides")
        if self.workers > 1 and not 0 < self.port <= 65535 - self.workers:
            raise ValueError(f"--workers {self.workers} needs a --port with as many free ports after it")
        return self

    def of_worker(self, number: int) -> Self:
        """The settings of one of several workers. The first one has the spool of a single process."""
        ending = f"-{number}" if number else ""
        files = {name: path + ending for name in ("spool", "audit_log") if (path := getattr(self, name))}
        return self.model_copy(update={**files, "port": self.port + 1 + number})


def run_gateway(settings: GatewaySettings) -> None:
    """Serves until a signal ends it, also while Ray is away."""
    check_listening(settings)
    if settings.workers > 1:
        asyncio.run(_run_workers(settings))
        return
    link = _link(settings)
    link.start()
    serve("gateway", gateway_app(settings, link), settings)


def _link(settings: GatewaySettings, listener: socket.socket | None = None) -> "LinkClient":
    from stepwell.pool.client.link import RayLink

    return network_link(settings) or RayLink(settings.ray_address, settings.ray_namespace, listener=listener)


async def _run_workers(settings: GatewaySettings) -> None:
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(prefix="stepwell-") as folder,
        listening_socket(settings.host, settings.port) as shared,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
    ):
        path = str(Path(folder) / "link")
        listener.bind(path)
        listener.listen()
        link = _link(settings, listener)
        await asyncio.to_thread(link.start)
        link.keep_running()
        log.info("gateway on %s, %d workers", settings.url, settings.workers)

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
    from stepwell.pool.client.link import SharedLink

    settings = settings.of_worker(number)
    link = network_link(settings) or SharedLink(path)
    try:
        link.start()
        own = listening_socket(settings.host, settings.port)
        app = gateway_app(settings, link, Path(path).with_name("engines"))
        serve(f"worker {number} of the gateway", app, settings, (shared, own))
    except StepwellError as failure:
        log.error("worker %d: %s", number, failure)
        sys.exit(CANNOT_START)


def gateway_app(settings: GatewaySettings, link: "LinkClient", watch: Path | None = None) -> "GatewayAsgi":
    """With `watch`, a socket file, all processes that share it have one watcher of engines."""
    from stepwell.common.tokenizers import BackgroundTokenizer, OnDemandTokenizer
    from stepwell.engines.discovery import EngineDiscovery, SharedWatch
    from stepwell.engines.fleet import EngineFleet
    from stepwell.gateway.app import GatewayApp
    from stepwell.gateway.bridge.recorded_turns import ThinkingPolicy
    from stepwell.gateway.recording.spool import Spool
    from stepwell.gateway.requests import CallQuota
    from stepwell.pool.client import PoolClient
    from stepwell.rewards.client import RewardClient

    keys, audit, hosts = keys_of(settings), audit_of(settings), hosts_of(settings)
    worker = settings.reward_worker_name
    pool = partial(PoolClient, settings.data_pool_name, settings.ray_namespace, transport=link)
    names = [address for address in settings.vllm_addresses if address.startswith(DNS)]
    addresses = [address for address in settings.vllm_addresses if address not in names]
    engines = EngineFleet(addresses, routing=settings.routing, api_key=settings.engine_key)
    return GatewayApp(
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
        trained_model=settings.model,
        other_models=settings.other_models,
        marked_side_calls=settings.marked_side_calls,
        answers_unchecked=settings.unchecked_calls == "answer",
        bridge=ThinkingPolicy(settings.thinking) if settings.bridge == "on" else None,
        session_sample=settings.session_sample,
        redactor=_redactor(settings),
        atropos=atropos_app(pool(), keys, audit, settings.atropos_state, hosts) if settings.atropos else None,
        hosts=hosts,
        sampling=_sampling(settings),
        rules=_rules(settings),
        quota=CallQuota.read(settings.quota),
    ).asgi()


def _sampling(settings: GatewaySettings) -> "dict[str, SamplingPolicy]":
    from stepwell.gateway.dialects.request_rules import SamplingPolicy

    return {
        channel: SamplingPolicy(mode != AS_ASKED, settings.temperature, of_sessions=mode == ALL_ON_POLICY)
        for channel, mode in (choice.split("=") for choice in settings.sampling)
    }


def _rules(settings: GatewaySettings) -> "RequestRules":
    from stepwell.gateway.dialects.request_rules import RequestRules

    fields, hosts = frozenset(settings.forward_fields), frozenset(settings.media_hosts)
    return RequestRules(fields, hosts, calls_as_text=settings.tool_calls == "text")


def _redactor(settings: GatewaySettings) -> "Redactor | None":
    """A function that cannot be loaded is refused at once."""
    if settings.redact is None:
        return None
    from stepwell.gateway.recording.redaction import Redactor, load_redaction

    load_redaction(settings.redact)
    return Redactor(settings.redact, settings.tokenizer_path)
