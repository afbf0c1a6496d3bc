"""The settings of `stepwell up`, `stepwell down` and `stepwell status`.

`up` reads ./stepwell.toml too: defaults < file < environment < flags. The tables of that file take the settings of the
commands that `up` starts, under the same names; the settings are not listed a second time.
"""

from collections.abc import Mapping
from typing import ClassVar, Self, TypeVar

from pydantic import Field, JsonValue, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    CliSuppress,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from stepwell.common.input_errors import explain_all
from stepwell.config.pool import PoolSettings
from stepwell.config.rewards import RewardSettings
from stepwell.config.sections import GROUP_SIZE, Listed, Section
from stepwell.config.serving import DashboardSettings, GatewaySettings
from stepwell.errors import BadRequest

S = TypeVar("S", bound=Section)

FILE = "stepwell.toml"
OWN = ("ray_address", "ray_namespace", "data_pool_name", "control_keys")
"""Settings that connect the parts to each other: `up` sets them itself."""


class UpSettings(Section):
    r"""Start everything on this machine: Ray, the DataPool, the gateway and the dashboard, and keep it running.

    Settings come from flags, from the environment or from ./stepwell.toml, whose tables [pool], [gateway], [dashboard]
    and [rewards] take all settings of the commands of these names. Ctrl-C, or `stepwell down` in the same folder,
    stops everything. The key, the journal and the logs are in ./.stepwell.

    The engine is a vLLM that was started with this command; PARSER is the tool call parser of the model:

        VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --host 127.0.0.1 --port 8001 \
          --logprobs-mode processed_logprobs --generation-config vllm --enable-scale-out \
          --enable-auto-tool-choice --tool-call-parser PARSER
    """

    model_config = SettingsConfigDict(env_prefix="STEPWELL_UP_")

    engine: Listed
    """Addresses of the running vLLM servers, separated by commas: http://host:port."""
    tokenizer_path: str | None = None
    """Folder or name of the Hugging Face tokenizer; without it, the engine is asked."""
    prompt_length: int | None = Field(default=None, ge=1)
    """Longest prompt, in tokens, that the trainer accepts; without it, the engine's context length."""
    response_length: int | None = Field(default=None, ge=1)
    """Longest response, in tokens; without it, the engine's context length."""
    group_size: int | None = Field(default=None, ge=1, validation_alias=GROUP_SIZE)
    """Trajectories in a group, where the registration does not say it; without it, 1. --n-rollouts is another name."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Policy versions that the oldest token may be behind when it is shipped; without it, any number."""
    session_idle: float | None = Field(default=None, gt=0)
    """Seconds without a call after which a session is completed by itself; without it, 300."""
    reward: str | None = None
    """Score unscored trajectories with this function: module:function, path/to/file.py:function, or a built-in."""
    atropos: bool = False
    """Also serve the Atropos-compatible API, below /atropos of the gateway."""
    host: str | None = None
    """Address to listen on; without it, 127.0.0.1."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """Port of the gateway; without it, 8100."""
    dashboard_port: int | None = Field(default=None, ge=1, le=65535)
    """Port of the dashboard; without it, 8200."""
    ray_address: str | None = None
    """Join this Ray cluster, host:port or auto, instead of starting one; the DataPool then stays after this command."""
    ray_namespace: str = "default"
    """Ray namespace of the DataPool."""
    detach: bool = False
    """Continue in the background once everything is ready."""
    show_key: bool = False
    """Print the key. Without it, only the path of its file is printed."""
    pool: CliSuppress[dict[str, JsonValue]] = Field(default_factory=dict)
    gateway: CliSuppress[dict[str, JsonValue]] = Field(default_factory=dict)
    dashboard: CliSuppress[dict[str, JsonValue]] = Field(default_factory=dict)
    rewards: CliSuppress[dict[str, JsonValue]] = Field(default_factory=dict)

    TABLES: ClassVar[Mapping[str, tuple[type[Section], tuple[str, ...]]]] = {
        "pool": (PoolSettings, OWN),
        "gateway": (GatewaySettings, (*OWN, "vllm_addresses", "reward_worker_name")),
        "dashboard": (DashboardSettings, (*OWN, "gateways")),
        "rewards": (RewardSettings, (*OWN, "function")),
    }
    """By name: the settings class, and the settings that the file may not contain."""

    @field_validator("engine")
    @classmethod
    def _are_addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value or not all(address.startswith(("http://", "https://")) for address in value):
            raise ValueError("write the address of a running engine: http://host:port")
        return tuple(address.rstrip("/").removesuffix("/v1") for address in value)

    @model_validator(mode="before")
    @classmethod
    def _knows_every_key(cls, given: dict[str, object]) -> dict[str, object]:
        for name in given:
            if name not in cls.model_fields:
                raise ValueError(f"{FILE}: there is no setting {name!r}; there are: {', '.join(cls.model_fields)}")
        return given

    @model_validator(mode="after")
    def _knows_every_key_of_the_tables(self) -> Self:
        for table, (settings, own) in self.TABLES.items():
            known = [name for name in settings.model_fields if name not in own]
            for name in getattr(self, table):
                if name not in known:
                    raise ValueError(f"{FILE}: [{table}] takes no {name!r}; it takes: {', '.join(known)}")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, _from_file(settings_cls)


class DownSettings(Section):
    """Stop what `stepwell up` started in this folder. The gateway delivers its waiting steps before it ends."""

    model_config = SettingsConfigDict(env_prefix="STEPWELL_DOWN_")


class StatusSettings(Section):
    """Show the pool, its channels, the gateways, the engines, and which data was lost and why, on one screen.

    The status is that of `stepwell up` in this folder, or of any dashboard, asked over HTTP.
    """

    model_config = SettingsConfigDict(env_prefix="STEPWELL_STATUS_")

    url: str | None = None
    """Address of the dashboard; without it, the one of `stepwell up` in this folder."""
    key: str | None = None
    """Control key of the dashboard. Prefer STEPWELL_STATUS_KEY: other users can read a command line."""
    as_json: bool = Field(default=False, alias="json")
    """Print the dashboard's whole answer as JSON."""


def layered(
    settings: type[S],
    table: str,
    *,
    given: Mapping[str, object],
    file: Mapping[str, object],
    otherwise: Mapping[str, object],
) -> S:
    """A command's settings. Each comes from the first of these that has it: `given` to `up`, the environment, the
    `file`'s table, `otherwise`. BadRequest says what is wrong."""

    set_by_up = {name: value for name, value in given.items() if value is not None}
    try:
        return settings(**{**otherwise, **file, **EnvSettingsSource(settings)(), **set_by_up})
    except ValidationError as wrong:
        mistakes = explain_all(wrong.errors(), lambda place: " ".join((f"[{table}]", *map(str, place[:1]))), "\n")
        raise BadRequest(mistakes) from None


def _from_file(settings: type[BaseSettings]) -> PydanticBaseSettingsSource:
    try:
        return TomlConfigSettingsSource(settings, FILE)
    except (OSError, ValueError) as failure:
        raise BadRequest(f"{FILE} cannot be read: {failure}") from None
