"""The settings of `stepwell dashboard`."""

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from stepwell.config.sections import Addresses, Listed, RaySection


class DashboardSettings(RaySection):
    """The dashboard: a page that shows what the pool, the gateways and the engines do, and obeys what you decide."""

    model_config = SettingsConfigDict(env_prefix="STEPWELL_DASHBOARD_")

    data_pool_name: str = "data_pool"
    """Name of the DataPool's Ray actor."""
    gateways: Addresses = ()
    """Addresses of the gateways to watch, separated by commas. They are asked with the first control key."""
    tokenizer_path: str | None = None
    """Folder or name of the Hugging Face tokenizer; without it, tokens are ids, and no text can be searched."""
    control_keys: Listed = ()
    """Keys that may do everything, separated by commas: the current one first, then older ones. Without any, all is
    open. Better given by STEPWELL_DASHBOARD_CONTROL_KEYS than on the command line, where others can read it."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=8200, ge=0, le=65535)
    """Port to listen on."""
