"""The plan of `stepwell up`: the settings of every part that it starts.

- They come from flags, the environment, ./stepwell.toml and what the engine reports: defaults < engine < file <
  environment < flags. The tables of that file take the settings of the commands that `up` starts, under the same names;
  the settings are not listed a second time.
- A part gets only settings that its own command has too.
- If a setting cannot be found out, the error names its flag.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self, TypeVar

from pydantic import Field, JsonValue, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    CliSuppress,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    TomlConfigSettingsSource,
)

from stepwell.commands.dashboard import DashboardSettings
from stepwell.commands.gateway import GatewaySettings
from stepwell.commands.pool import PoolSettings
from stepwell.commands.rewards import RewardSettings
from stepwell.commands.sections import GROUP_SIZE, Listed, Section
from stepwell.commands.state_folder import StateFolder
from stepwell.common.http import JsonAnswer
from stepwell.common.user_input import explain_all
from stepwell.errors import BadRequest, EngineUnavailable

S = TypeVar("S", bound=Section)

FILE = "stepwell.toml"
SESSION_IDLE = 300.0
"""Seconds without a call after which a session is completed: nobody else ends those of a plain client."""
OWN = ("ray_address", "ray_namespace", "data_pool_name", "control_keys")
"""Settings that connect the parts to each other: `up` sets them itself."""
TABLES: Mapping[str, tuple[type[Section], tuple[str, ...]]] = {
    "pool": (PoolSettings, OWN),
    "gateway": (GatewaySettings, (*OWN, "vllm_addresses", "reward_worker_name")),
    "dashboard": (DashboardSettings, (*OWN, "gateways")),
    "rewards": (RewardSettings, (*OWN, "function")),
}
"""The tables of stepwell.toml, each with its settings class and the settings that it may not contain."""


class UpSettings(Section, env_prefix="STEPWELL_UP_"):
    r"""Start everything on this machine: Ray, the DataPool, the gateway and the dashboard, and keep it running.

    Settings come from flags, from the environment or from ./stepwell.toml, whose tables [pool], [gateway], [dashboard]
    and [rewards] take all settings of the commands of these names. Ctrl-C, or `stepwell down` in the same folder,
    stops everything. The key, the journal and the logs are in ./.stepwell.

    The engine is a vLLM that was started with this command; PARSER is the tool call parser of the model:

        VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --host 127.0.0.1 --port 8001 \
          --logprobs-mode processed_logprobs --generation-config vllm --enable-scale-out \
          --enable-auto-tool-choice --tool-call-parser PARSER
    """

    examples = (
        "stepwell up --engine http://127.0.0.1:8001",
        "stepwell up --engine http://127.0.0.1:8001 --group-size 8 --reward my_rewards.py:score --detach",
    )

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
    """Serve the Atropos-compatible API too, below /atropos of the gateway."""
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
        for table, (settings, own) in TABLES.items():
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


def _from_file(settings: type[BaseSettings]) -> PydanticBaseSettingsSource:
    try:
        return TomlConfigSettingsSource(settings, FILE)
    except (OSError, ValueError) as failure:
        raise BadRequest(f"{FILE} cannot be read: {failure}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The engine's report of the model that it serves; fields are None that it does not report."""

    name: str
    root: str | None
    """Folder on the engine's machine, or name on the Hugging Face hub."""
    window: int | None
    """Largest number of tokens of prompt and response together."""


def read_model(address: str, answer: JsonAnswer) -> ServedModel:
    if answer.status in (401, 403):
        raise EngineUnavailable(f"the engine at {address} requires a key: set STEPWELL_GATEWAY_ENGINE_KEY to it")
    match answer.body:
        case {"data": [{"id": str(name), **rest}, *_]} if answer.status == 200:
            root, window = rest.get("root"), rest.get("max_model_len")
            return ServedModel(
                name=name,
                root=root if isinstance(root, str) and root else None,
                window=window if isinstance(window, int) else None,
            )
    raise EngineUnavailable(
        f"{address} lists no models at /v1/models ({answer.message}): is it an OpenAI-compatible server?"
    )


def tokenizer_of(model: ServedModel) -> str | None:
    """Path or name of its tokenizer for this machine; None if it is not known."""
    root = model.root
    is_path = root is not None and root.startswith(("/", "./", "../", "~"))
    return None if root is None or (is_path and not Path(root).expanduser().exists()) else root


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    pool: PoolSettings
    gateway: GatewaySettings
    dashboard: DashboardSettings
    rewards: RewardSettings | None

    def on(self, ray_address: str) -> Self:
        """The same plan for the cluster at that address."""
        there = {"ray_address": ray_address}
        return replace(
            self,
            pool=self.pool.model_copy(update=there),
            gateway=self.gateway.model_copy(update=there),
            dashboard=self.dashboard.model_copy(update=there),
            rewards=self.rewards and self.rewards.model_copy(update=there),
        )


def make_plan(up: UpSettings, model: ServedModel, folder: StateFolder, key: str) -> LaunchPlan:
    tokenizer = tokenizer_of(model)
    pool = layered(
        *(PoolSettings, "pool", up),
        given={
            "ray_namespace": up.ray_namespace,
            "group_size": up.group_size,
            "max_staleness": up.max_staleness,
            "session_idle": up.session_idle,
            "require_reward": True if up.reward else None,
        },
        otherwise={"journal": str(folder.journal), "session_idle": SESSION_IDLE},
    )
    joined = {"ray_namespace": up.ray_namespace, "data_pool_name": pool.name}
    rewards = None
    if up.reward:
        of_rewards = {"tokenizer_path": up.tokenizer_path or tokenizer}
        given = {**joined, "function": up.reward}
        rewards = layered(RewardSettings, "rewards", up, given=given, otherwise=of_rewards)
    found = {"tokenizer_path": tokenizer, "prompt_length": model.window, "response_length": model.window}
    _require_all(up, model, found)
    served = {**joined, "control_keys": (key,), "host": up.host}
    keys_file = str(folder.issued_keys)
    gateway = layered(
        *(GatewaySettings, "gateway", up),
        given={
            **served,
            "vllm_addresses": up.engine,
            **{name: getattr(up, name) for name in found},
            "reward_worker_name": rewards and rewards.name,
            "atropos": up.atropos or None,
            "port": up.port,
        },
        otherwise={
            **found,
            "spool": str(folder.spool),
            "atropos_state": str(folder.atropos),
            "keys_file": keys_file,
        },
    )
    dashboard = layered(
        *(DashboardSettings, "dashboard", up),
        given={**served, "gateways": (gateway.local_url,), "port": up.dashboard_port},
        otherwise={"tokenizer_path": gateway.tokenizer_path, "keys_file": keys_file},
    )
    return LaunchPlan(pool=pool, gateway=gateway, dashboard=dashboard, rewards=rewards)


def _require_all(up: UpSettings, model: ServedModel, found: Mapping[str, object]) -> None:
    """BadRequest if the engine does not report what is found nowhere else."""
    missing = [name for name in found if found[name] is None and getattr(up, name) is None and name not in up.gateway]
    if missing:
        where = f", and its model is in {model.root}, which is not on this machine" if model.root else ""
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise BadRequest(f"the engine at {up.engine[0]} does not report everything that is needed{where}; give {flags}")


def layered(
    settings: type[S], table: str, up: UpSettings, *, given: Mapping[str, object], otherwise: Mapping[str, object]
) -> S:
    """A command's settings. Each comes from the first of these that has it: `given` to `up`, the environment, the
    table of the file, `otherwise`. BadRequest says what is wrong."""
    set_by_up = {name: value for name, value in given.items() if value is not None}
    try:
        return settings(**{**otherwise, **getattr(up, table), **EnvSettingsSource(settings)(), **set_by_up})
    except ValidationError as wrong:
        mistakes = explain_all(wrong.errors(), lambda place: " ".join((f"[{table}]", *map(str, place[:1]))), "\n")
        raise BadRequest(mistakes) from None


def environment(settings: Section) -> dict[str, str]:
    """The settings as environment variables of the command, which a list of processes does not show."""
    prefix = settings.model_config.get("env_prefix", "")
    given = settings.model_dump(exclude_none=True)
    return {f"{prefix}{name}".upper(): _as_text(value) for name, value in given.items()}


def _as_text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
