"""Settings of an environment and its servers: defaults (its config_init) < YAML file < flags.

- A field's docstring is its line in --help, which shows no secrets. An environment's own settings are fields of a
  subclass of BaseEnvConfig; its class attribute `env_config_cls` names that subclass.
- An unknown flag is an error. BadRequest has one line for each error.
- An unknown key of a file is kept and changes nothing, as in Atropos; the log names it.
- Flags of --openai apply to all servers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    create_model,
    field_validator,
)
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsConfigDict

from stepwell.common.command_line import FlagParser, with_dashes
from stepwell.common.imports import require
from stepwell.common.user_input import dotted, explain_all
from stepwell.errors import BadRequest


class EvalHandling(StrEnum):
    """How an evaluation affects training. Groups that have begun are always finished."""

    STOP_TRAIN = "STOP_TRAIN"
    LIMIT_TRAIN = "LIMIT_TRAIN"
    NONE = "NONE"


class EnvSection(BaseModel):
    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True, protected_namespaces=())


class BaseEnvConfig(EnvSection):
    group_size: int = Field(default=4, ge=1)
    """Rollouts of one item; they are trained together."""
    max_num_workers: int = Field(default=-1, ge=-1)
    """Concurrent groups; -1 means max_num_workers_per_node for each server."""
    max_num_workers_per_node: int = Field(default=8, ge=1)
    """Concurrent groups for each server, if max_num_workers is -1."""
    max_eval_workers: int = Field(default=16, ge=1)
    """Concurrent rollouts of an evaluation."""
    steps_per_eval: int = Field(default=100, ge=0)
    """Training steps between two evaluations; 0 means never."""
    eval_handling: EvalHandling = EvalHandling.STOP_TRAIN
    """While an evaluation runs: STOP_TRAIN starts no groups, LIMIT_TRAIN fewer than usual, NONE as many as usual."""
    eval_limit_ratio: float = Field(default=0.5, ge=0, le=1)
    """Share of the concurrent groups that LIMIT_TRAIN leaves to training."""
    max_token_length: int = Field(default=2048, ge=1)
    """Most tokens of a rollout; also used to divide the servers between environments."""
    inference_weight: float = 1.0
    """Weight of this environment when the servers are divided between environments; below 0 it is left out."""
    batch_size: int = Field(default=-1, ge=-1)
    """Sequences in a trainer's batch; -1 asks the rollout server, whose value overrides any other."""
    max_batches_offpolicy: int = Field(
        default=3, ge=0, validation_alias=AliasChoices("max_batches_offpolicy", "off_policy_tolerance")
    )
    """No groups are started while so many batches wait for the trainer; 0 means no limit."""
    min_batch_allocation: float | None = Field(default=None, ge=0, le=1)
    """Share of every batch that is reserved for this environment."""
    total_steps: int = Field(default=1000, ge=-1)
    """Training step at which the environment ends; -1 asks the rollout server."""
    worker_timeout: float = 600.0
    """Seconds after which a group is given up; 0 or less means no limit."""
    ensure_scores_are_not_same: bool = True
    """Drop groups whose scores are all equal: they have no advantage to train on."""
    tokenizer_name: str | None = None
    """Name or folder of the Hugging Face tokenizer; by default that of the first server."""
    rollout_server_url: str = "http://localhost:8000"
    """Address of the rollout server: stepwell atropos."""
    rollout_server_key: str | None = None
    """Key for the rollout server."""
    include_messages: bool = False
    """Send the messages too; for a rollout without messages, its decoded tokens."""
    data_path_to_save_groups: str | None = None
    """JSON lines file to which every sent group is appended."""
    use_wandb: bool = False
    """Log to Weights & Biases."""
    wandb_name: str | None = None
    """Name of this environment in logs, in checkpoints and at the rollout server; by default that of its class."""
    num_rollouts_to_keep: int = Field(default=32, ge=0)
    """Groups in the logged table."""
    num_rollouts_per_group_for_logging: int = Field(default=1, ge=-1)
    """Rollouts of a group in the logged table; -1 means all."""
    data_dir_to_save_evals: str | None = None
    """Folder to which evaluate_log writes its results."""
    thinking_mode: bool = False
    """Ask the servers for reasoning; on if reasoning_effort or max_reasoning_tokens is set."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """How much the servers shall reason."""
    max_reasoning_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of reasoning; reasoning_effort overrides it."""
    custom_thinking_prompt: str | None = None
    """The prompt for reasoning of environments that have their own."""
    min_items_sent_before_logging: int = 2
    """A new training step is logged after so many sent groups; 0 or less logs every step."""

    @field_validator("rollout_server_url")
    @classmethod
    def _is_address(cls, value: str) -> str:
        if not value.startswith(("http://", "https://")):
            raise ValueError(f"{value!r} is no address; write http://host:port")
        return value.rstrip("/")


class ServerBaseline(EnvSection):
    """The common settings of all servers. Without addresses, it stands for one server at the default address."""

    model_name: str = "default"
    """Name of the model in requests."""
    tokenizer_name: str | None = None
    """Name or folder of the model's Hugging Face tokenizer; by default the model's name."""
    timeout: float = Field(default=1200.0, gt=0)
    """Timeout of a request in seconds."""
    num_max_requests_at_once: int = Field(default=512, ge=1)
    """Concurrent requests."""
    num_requests_for_eval: int = Field(default=64, ge=0)
    """Concurrent requests of evaluations; 0, which files of Atropos without one give, is as 1."""
    server_type: str = "openai"
    """A field that is not used: every server is called with OpenAI's API."""
    rolling_buffer_length: int = 1000
    """Calls whose durations are kept for the metrics of the server."""

    @field_validator("tokenizer_name")
    @classmethod
    def _is_named(cls, value: str | None) -> str | None:
        return None if value == "none" else value


class APIServerConfig(ServerBaseline):
    """A server that an environment samples from: anything that speaks OpenAI's API, or Stepwell's gateway."""

    base_url: str | None = "http://localhost:8100/unrecorded/v1"
    """Address of the server, with its /v1; a gateway's is /unrecorded/v1, because the environment keeps the tokens.
    None is OpenAI's own."""
    api_key: str | None = None
    """Key for the server; for a gateway, its control key."""
    n_kwarg_is_ignored: bool = False
    """The server gives one choice whatever `n` is: a call with `n` becomes so many calls."""
    health_check: bool = True
    """Avoid the server while it cannot be reached, and check when it is back."""


def as_server_configs(given: ServerBaseline | Sequence[APIServerConfig]) -> tuple[APIServerConfig, ...]:
    """One server, several, or a baseline without an address."""
    if isinstance(given, APIServerConfig):
        return (given,)
    return (APIServerConfig(**given.model_dump()),) if isinstance(given, ServerBaseline) else tuple(given)


def unknown_settings(section: BaseModel, prefix: str) -> list[str]:
    """A sentence for each key that the section has no field for. It does not contain the value, which may be secret."""
    return [
        f"{prefix}{name}: there is no such setting; it changes nothing"
        + "".join(
            f"; did you mean {prefix}{near}?" for near in get_close_matches(name, type(section).model_fields, n=1)
        )
        for name in section.model_extra or ()
    ]


# -- the command line and the file -------------------------------------------------------------------------------------

M = TypeVar("M", bound=BaseModel)

HIDDEN = "***"
KEYS = ("api_key", "rollout_server_key")
"""Fields whose value --help must not show."""


class EnvFlags(BaseSettings):
    """The flags of every command; `env` and `openai` are added for each environment."""

    model_config = SettingsConfigDict(extra="forbid", use_attribute_docstrings=True, cli_kebab_case=True)

    config: str | None = None
    """YAML file with `env:` and `openai:`, as Atropos reads it; `openai:` is one server or a list of servers."""
    slurm: bool = False
    """Accepted as in Atropos; changes nothing."""
    testing: bool = False
    """Accepted as in Atropos; changes nothing."""
    port: int | None = None
    """Accepted as in Atropos' documentation; changes nothing, because an environment listens on no port."""
    max_n_completions: int | None = None
    """Accepted as in Atropos; changes nothing: a call with a large `n` is one call."""
    proxy_url: str | None = None
    """Accepted as in Atropos; changes nothing: every server gives managed sessions."""
    defaults: ClassVar[tuple[BaseEnvConfig, ServerBaseline | Sequence[APIServerConfig]] | None] = None
    """The environment's own; None if config_init has not been asked yet."""
    in_file: ClassVar[tuple[str, ...]] = ("slurm", "testing")
    """Flags that a file may also contain, beside its sections."""
    _command: Callable[[], None] = PrivateAttr()

    @classmethod
    def with_defaults(cls, env: BaseEnvConfig, servers: ServerBaseline | Sequence[APIServerConfig]) -> type[Self]:
        return type(cls.__name__, (cls,), {"defaults": (env, servers), "__module__": cls.__module__})

    def run(self) -> None:
        """Runs the command; a subclass may do something before or after it."""
        self._command()

    def run_command(self, command: Callable[[], None]) -> None:
        self._command = command
        self.run()


class ProcessFlags(EnvFlags):
    groups: int = Field(default=10, ge=1)
    """Groups to make."""
    out: str = "groups"
    """Folder for groups.jsonl, groups.parquet and groups.html."""
    group_size: int | None = None
    """Rollouts in a group; short for --env.group-size."""


@dataclass(frozen=True, slots=True)
class EnvSettings:
    """All settings, or the defaults that an environment's config_init returns."""

    env: BaseEnvConfig
    servers: Sequence[APIServerConfig]
    flags: EnvFlags
    notes: Sequence[str] = ()
    """Sentences for the log about what was given and changes nothing."""


def read_flags(defaults: EnvSettings, argv: Sequence[str], parser: FlagParser) -> EnvSettings:
    given = _parse(defaults, argv, parser)
    file = _read_yaml(given.get("config"))
    own = {key: value for key, value in given.items() if key not in ("env", "openai")}
    in_file = {key: file[key] for key in defaults.flags.in_file if key in file}
    read = _validated(type(defaults.flags), merged(in_file, own), "")
    short = {"group_size": own["group_size"]} if own.get("group_size") is not None else {}
    return EnvSettings(
        env=_validated(
            type(defaults.env), merged(defaults.env.model_dump(), file.get("env"), given.get("env"), short), "env."
        ),
        servers=_servers(defaults.servers, file.get("openai"), given.get("openai")),
        flags=read,
        notes=_notes(file, read),
    )


def _notes(file: Mapping[str, Any], flags: EnvFlags) -> list[str]:
    notes = [
        f"--config: {key!r} changes nothing: settings stand below `env:` and `openai:`"
        for key in file
        if key not in ("env", "openai", *flags.in_file)
    ]
    if flags.port is not None:
        notes.append(
            f"--port {flags.port} changes nothing: an environment listens on no port."
            " --env.rollout-server-url is the address of the rollout server"
        )
    given = {"--max-n-completions": flags.max_n_completions, "--proxy-url": flags.proxy_url}
    notes += [f"{name} changes nothing here" for name, value in given.items() if value is not None]
    return notes


def _servers(defaults: Sequence[APIServerConfig], file: Any, flags: Any) -> tuple[APIServerConfig, ...]:
    """A list in the file replaces the defaults; a mapping, like the flags, overrides values of each default."""
    bases = file if isinstance(file, list) else [merged(server.model_dump(), file) for server in defaults]
    kind = type(defaults[0]) if defaults else APIServerConfig
    return tuple(_validated(kind, merged(base, flags), "openai.") for base in bases)


def merged(*layers: Any) -> dict[str, Any]:
    """Later layers override earlier ones, mapping by mapping. None is an empty layer."""
    result: dict[str, Any] = {}
    for layer in layers:
        if layer is not None and not isinstance(layer, Mapping):
            raise BadRequest(
                f"{layer!r} is no mapping; write `group_size: 8` below `env:`, `base_url: …` below `openai:`"
            )
        for key, value in (layer or {}).items():
            both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
            result[key] = merged(result[key], value) if both else value
    return result


def _parse(defaults: EnvSettings, argv: Sequence[str], parser: FlagParser) -> dict[str, Any]:
    """The values of the flags by field, not validated yet."""
    env, server = defaults.env, next(iter(defaults.servers), APIServerConfig())
    settings = create_model(
        "Settings",
        __base__=type(defaults.flags),
        env=(type(env), Field(_without_keys(env), description="The environment.")),
        openai=(type(server), Field(_without_keys(server), description="The servers that it samples from.")),
    )
    source: CliSettingsSource[Any] = CliSettingsSource(
        settings, root_parser=parser, cli_parse_args=with_dashes(argv), cli_hide_none_type=True, cli_avoid_json=True
    )
    return source()


def _without_keys(model: M) -> M:
    return model.model_copy(update={key: HIDDEN for key in KEYS if getattr(model, key, None) is not None})


def _read_yaml(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    yaml = require("yaml", "envs", purpose="--config")
    try:
        read = yaml.safe_load(Path(path).read_text()) or {}
    except OSError as failure:
        raise BadRequest(f"--config: {path} cannot be read: {failure.strerror}") from None
    except yaml.YAMLError as failure:
        raise BadRequest(f"--config: {path} is no YAML: {' '.join(str(failure).split())}") from None
    if not isinstance(read, dict):
        raise BadRequest(f"--config: {path} is no mapping; write settings below `env:` and `openai:`")
    return read


def _validated(model: type[M], values: Any, prefix: str) -> M:
    try:
        return model.model_validate(values)
    except ValidationError as invalid:
        mistakes = explain_all(invalid.errors(), lambda place: (prefix + dotted(place)).rstrip("."), "\n")
        raise BadRequest(mistakes) from None
