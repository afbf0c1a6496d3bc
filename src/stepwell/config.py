"""The settings: defaults < environment < flags. An unknown key is an error.

A field's docstring is its line in --help.
"""

from collections.abc import Sequence
from typing import Annotated, TypeVar

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from stepwell.errors import BadRequest

S = TypeVar("S", bound=BaseSettings)


class Section(BaseSettings):
    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
    )


class RaySection(Section):
    ray_address: str = "auto"
    """Ray's address, host:port; auto is the cluster on this machine."""
    ray_namespace: str = "default"
    """Ray namespace the DataPool lives in."""


class PoolSettings(RaySection):
    """Create the DataPool on a running Ray cluster, and leave it there. Finding it there already is fine."""

    model_config = SettingsConfigDict(env_prefix="STEPWELL_POOL_")

    name: str = "data_pool"
    """Name of the DataPool's Ray actor."""
    max_queue_size: int = Field(default=10_000, ge=1)
    """Groups held per channel; when one more arrives the oldest is dropped."""
    group_size: int = Field(default=1, ge=1)
    """Trajectories in a group, where whoever registers them does not say."""


class GatewaySettings(RaySection):
    """The gateway: agents call it as they would call OpenAI, and every call becomes a step in the DataPool."""

    model_config = SettingsConfigDict(env_prefix="STEPWELL_GATEWAY_")

    data_pool_name: str
    """Name of the DataPool's Ray actor."""
    vllm_addresses: Annotated[tuple[str, ...], NoDecode]
    """Addresses of the vLLM servers, separated by commas; calls go to them in turn."""
    tokenizer_path: str
    """Folder or name of the Hugging Face tokenizer. It decodes text for rewards; recording never uses it."""
    prompt_length: int = Field(ge=1)
    """Longest prompt, in tokens, that a trainer will take; a longer one is answered, and quarantined."""
    response_length: int = Field(ge=1)
    """Longest response, in tokens; no engine is asked for more."""
    reward_worker_name: str | None = None
    """Name of the reward worker's Ray actor, if there is one."""
    host: str = "0.0.0.0"
    """Address to listen on."""
    port: int = Field(default=8100, ge=0, le=65535)
    """Port to listen on."""

    @field_validator("vllm_addresses", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return value.split(",") if isinstance(value, str) else value

    @field_validator("vllm_addresses")
    @classmethod
    def _are_addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for address in value:
            if not address.startswith(("http://", "https://")):
                raise ValueError(f"{address!r} is no address; write http://host:port,http://host:port")
        return tuple(address.rstrip("/") for address in value)


def read_settings(settings: type[S], argv: Sequence[str], command: str) -> S:
    """The settings from the environment and the flags. BadRequest says what is wrong with them, a line each."""
    try:
        return settings(_cli_parse_args=list(argv), _cli_prog_name=command)
    except ValidationError as wrong:
        raise BadRequest("\n".join(_explained(error["loc"], error["msg"]) for error in wrong.errors())) from None


def _explained(where: tuple[int | str, ...], message: str) -> str:
    flag = "".join(f"--{str(name).replace('_', '-')}: " for name in where[:1])
    return flag + message.removeprefix("Value error, ")
