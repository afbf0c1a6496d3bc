"""The settings of what agents and environments call: `stepwell gateway` and `stepwell atropos`."""

from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from stepwell.config.sections import Addresses, Listed, RaySection


class GatewaySettings(RaySection):
    """The gateway: agents call it as they would call OpenAI, and every call becomes a step in the DataPool."""

    model_config = SettingsConfigDict(env_prefix="STEPWELL_GATEWAY_")

    data_pool_name: str
    """Name of the DataPool's Ray actor."""
    vllm_addresses: Addresses
    """Addresses of the vLLM servers, separated by commas; calls go to them in turn."""
    tokenizer_path: str
    """Folder or name of the Hugging Face tokenizer. It decodes text for rewards; recording never uses it."""
    prompt_length: int = Field(ge=1)
    """Longest prompt, in tokens, that a trainer will take; a longer one is answered, and quarantined."""
    response_length: int = Field(ge=1)
    """Longest response, in tokens; no engine is asked for more."""
    reward_worker_name: str | None = None
    """Name of the reward worker's Ray actor, if there is one."""
    control_keys: Listed = ()
    """Keys that may do everything, separated by commas: the current one first, then older ones. Without any, all is
    open. Better given by STEPWELL_GATEWAY_CONTROL_KEYS than on the command line, where others can read it."""
    engine_key: str | None = None
    """Key that the engines ask for."""
    routing: Literal["round_robin", "least_busy", "sticky"] = "round_robin"
    """Which engine gets a call: round_robin, least_busy, or sticky (always the same one for a trajectory)."""
    durability: Literal["async", "sync"] = "async"
    """async answers at once; sync answers only after the pool has confirmed the step."""
    spool: str | None = None
    """File in which steps wait for the pool, so that they outlive this process; without one they wait in memory."""
    atropos: bool = False
    """Serve the Atropos door too, below /atropos."""
    atropos_state: str | None = None
    """File in which the door's registrations and steps outlive this process."""
    host: str = "0.0.0.0"
    """Address to listen on."""
    port: int = Field(default=8100, ge=0, le=65535)
    """Port to listen on."""


class AtroposSettings(RaySection):
    """The Atropos door: environments and trainers written for Atropos use it as their server, with the DataPool behind.

    Below /channel/NAME it serves further channels, each with a trainer of its own.
    """

    model_config = SettingsConfigDict(env_prefix="STEPWELL_ATROPOS_")

    data_pool_name: str = "data_pool"
    """Name of the DataPool's Ray actor."""
    control_keys: Listed = ()
    """Keys that may do everything, separated by commas: the current one first, then older ones. Without any, all is
    open. Better given by STEPWELL_ATROPOS_CONTROL_KEYS than on the command line, where others can read it."""
    state: str | None = None
    """File in which registrations and steps outlive this process; without one, they are forgotten with it."""
    host: str = "0.0.0.0"
    """Address to listen on."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on."""
