"""The settings of the servers: `stepwell gateway`, `stepwell atropos`, `stepwell dashboard` and `stepwell link`."""

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_settings import SettingsConfigDict

from stepwell.common.listening import is_safe_url, read_host_and_port
from stepwell.config.sections import Addresses, EngineAddresses, Listed, PoolSection, Section, ServerSection

SAMPLING_MODES = AS_ASKED, ON_POLICY, ALL_ON_POLICY = "as_asked", "on_policy", "all_on_policy"


def _are_choices(value: tuple[str, ...]) -> tuple[str, ...]:
    for choice in value:
        channel, _, mode = choice.partition("=")
        if not channel or mode not in SAMPLING_MODES:
            modes = " or ".join(f"CHANNEL={mode}" for mode in SAMPLING_MODES)
            raise ValueError(f"{choice!r} is not {modes}")
    return value


PERSON = re.compile(r"group:.*\S.*|[^@\s:]+@[^@\s:]+")


def _are_people(value: tuple[str, ...]) -> tuple[str, ...]:
    for entry in value:
        if not PERSON.fullmatch(entry):
            raise ValueError(f"{entry!r} is neither a mail address nor group:NAME")
    return value


def _is_safe(value: str | None) -> str | None:
    if value is not None and not is_safe_url(value):
        raise ValueError(f"{value!r} is not an https address (http is for loopback only)")
    return value


def _is_host_and_port(value: str) -> str:
    read_host_and_port(value)
    return value


People = Annotated[Listed, AfterValidator(_are_people)]
SafeAddress = Annotated[str | None, AfterValidator(_is_safe)]
SamplingChoices = Annotated[Listed, AfterValidator(_are_choices)]


class GatewaySettings(ServerSection):
    """Serve agents as an OpenAI-compatible API, and record every call as a step in the DataPool."""

    model_config = SettingsConfigDict(env_prefix="STEPWELL_GATEWAY_")

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
    """What one trajectory, or the user of a session key in all sessions, may use at a time, as NAME=NUMBER, separated
    by commas: in_flight calls (512), bytes of their requests (134217728), and calls per_second and tokens_per_second
    (0: any)."""
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
    """What the model sees of its own earlier thinking over a bridge: what the chat template shows, all of it until the
    user's next message, or all of it."""
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
    """Also serve the Atropos-compatible API, below /atropos."""
    atropos_state: str | None = None
    """File that keeps the registrations and step count of the Atropos-compatible API across restarts."""
    port: int = Field(default=8100, ge=0, le=65535)
    """Port to listen on."""
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


class SessionKeySettings(Section):
    """Print a session key, by which a user opens sessions at the gateways that have the same control key."""

    model_config = SettingsConfigDict(env_prefix="STEPWELL_GATEWAY_")

    user: str = Field(min_length=1, max_length=200)
    """Name of the user or the deployment; it is in the metadata of the sessions."""
    capture: Literal["on", "off"] = "on"
    """off: calls with this key are answered and not recorded."""
    control_keys: Listed = ()
    """Control keys of the gateways, separated by commas; the first one is used. Prefer the environment variable."""


class AtroposSettings(ServerSection):
    """Serve environments and trainers that were written for Atropos, with the DataPool as the storage.

    Paths below /channel/NAME serve further channels, each with its own trainer.
    """

    model_config = SettingsConfigDict(env_prefix="STEPWELL_ATROPOS_")

    state: str | None = None
    """File that keeps the registrations and the step count across restarts; without it, they are lost."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on."""


class DashboardSettings(ServerSection):
    """Serve a web page that shows the state of the pool, the gateways and the engines, and lets you curate data."""

    model_config = SettingsConfigDict(env_prefix="STEPWELL_DASHBOARD_")

    gateways: Addresses = ()
    """Addresses of the gateways to watch, separated by commas. The first control key is sent to them."""
    tokenizer_path: str | None = None
    """Folder or name of the Hugging Face tokenizer; without it, the page shows token ids, and text search is off."""
    oidc_issuer: SafeAddress = None
    """Let people log in at this OIDC provider: https://… . Needs control keys, --oidc-client-id, a list of people, and
    the extra `oidc` of the package."""
    oidc_client_id: str | None = None
    """What the provider knows this dashboard by. Its secret is no flag: STEPWELL_DASHBOARD_OIDC_CLIENT_SECRET in the
    environment; without it, the dashboard is a public client."""
    oidc_viewers: People = ()
    """Who may log in and look, separated by commas: mail addresses that the provider has verified, or group:NAME for
    all with that name in the claim `groups`."""
    oidc_curators: People = ()
    """Who may log in, look, and mark, reject and relabel; as in --oidc-viewers."""
    public_url: SafeAddress = None
    """Address at which browsers reach the dashboard, if a proxy is in front of it; the provider sends people back to
    it. Without it, the address that the browser asks for."""
    port: int = Field(default=8200, ge=0, le=65535)
    """Port to listen on."""

    @model_validator(mode="after")
    def _check_oidc(self) -> Self:
        people = (*self.oidc_viewers, *self.oidc_curators)
        if self.oidc_issuer is None and (people or self.oidc_client_id):
            raise ValueError("--oidc-client-id, --oidc-viewers and --oidc-curators need --oidc-issuer")
        if self.oidc_issuer is not None and not self.oidc_client_id:
            raise ValueError("--oidc-issuer needs --oidc-client-id, which the provider gives")
        if self.oidc_issuer is not None and not people:
            raise ValueError("--oidc-issuer needs --oidc-viewers or --oidc-curators: without them nobody may log in")
        if self.oidc_issuer is not None and not self.control_keys:
            raise ValueError(
                "--oidc-issuer needs control keys (STEPWELL_DASHBOARD_CONTROL_KEYS): the cookie of a person who is "
                "logged in is sealed with a secret that is made from them"
            )
        return self


class LinkSettings(PoolSection):
    """Let gateways, dashboards and Atropos servers on machines without Ray use the DataPool, over TLS.

    Run it on a machine of the Ray cluster. Several may run, for the same pool.
    """

    model_config = SettingsConfigDict(env_prefix="STEPWELL_LINK_")

    listen: Annotated[str, AfterValidator(_is_host_and_port)]
    """Address to listen on, host:port."""
    tls_cert: str
    """File with the certificate, in PEM. Without TLS, whoever sees the network would read the pool's data."""
    tls_key: str
    """File with the key of the certificate, in PEM, not encrypted."""
    secret_file: str
    """File with the secret that clients must know, of 32 characters or more, which no other user can read; openssl rand
    -hex 32 makes one. With several, one in each line, each lets in."""
