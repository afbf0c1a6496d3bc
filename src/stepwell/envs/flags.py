"""The settings of an environment on its command line: defaults (its config_init) < YAML file < flags.

- An unknown flag is an error. BadRequest has one line for each error.
- An unknown key of a file changes nothing; the log names it.
- --help shows no secrets.
- Flags and their help come from the fields of the configurations and their docstrings. Flags of --openai apply to all
  servers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, Field, PrivateAttr, ValidationError, create_model
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsConfigDict

from stepwell.common.command_line import FlagParser, with_dashes
from stepwell.common.imports import require
from stepwell.common.user_input import dotted, explain_all
from stepwell.envs.config import APIServerConfig, BaseEnvConfig, ServerBaseline
from stepwell.errors import BadRequest

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
