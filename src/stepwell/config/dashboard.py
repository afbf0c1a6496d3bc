"""The settings of `stepwell dashboard`."""

from typing import Annotated

from pydantic import Field, field_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from stepwell.config.sections import RaySection, split


class DashboardSettings(RaySection):
    """The dashboard: a page that shows what the pool, the gateways and the engines do, and obeys what you decide."""

    model_config = SettingsConfigDict(env_prefix="STEPWELL_DASHBOARD_")

    data_pool_name: str = "data_pool"
    """Name of the DataPool's Ray actor."""
    gateways: Annotated[tuple[str, ...], NoDecode] = ()
    """Addresses of the gateways to watch, separated by commas. They are asked with the first control key."""
    tokenizer_path: str | None = None
    """Folder or name of the Hugging Face tokenizer; without it, tokens are ids, and no text can be searched."""
    control_keys: Annotated[tuple[str, ...], NoDecode] = ()
    """Keys that may do everything, separated by commas: the current one first, then older ones. Without any, all is
    open. Better given by STEPWELL_DASHBOARD_CONTROL_KEYS than on the command line, where others can read it."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=8200, ge=0, le=65535)
    """Port to listen on."""

    @field_validator("gateways", "control_keys", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return split(value)

    @field_validator("gateways")
    @classmethod
    def _are_addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for address in value:
            if not address.startswith(("http://", "https://")):
                raise ValueError(f"{address!r} is no address; write http://host:port,http://host:port")
        return tuple(address.rstrip("/") for address in value)
