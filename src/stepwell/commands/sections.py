"""The common base of all settings, and how they are read: defaults < environment < flags.

- An unknown key is an error.
- A field's docstring is its line in --help.
- The groups of settings that several commands take are here; each command adds its own.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from inspect import cleandoc
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, CliSettingsSource, NoDecode, SettingsConfigDict

from stepwell.common.command_line import FlagParser, with_dashes
from stepwell.common.listening import LINK, read_host_and_port
from stepwell.common.user_input import explain_all, read_duration
from stepwell.errors import BadRequest

DNS = "dns://"
DNS_ADDRESS = re.compile(r"dns://[^/:\s]+:\d+")
HOST_NAME = re.compile(r"[A-Za-z0-9_.\-]+|\[?[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*\]?")
"""The name of a host, without a port; or an IPv6 address."""

METAVARS: Mapping[str, str] = {
    flag: metavar
    for metavar, flags in {
        "ADDRESS": "--engine --gateway --host --listen --oidc-issuer --public-url --ray-address --url",
        "ADDRESSES": "--gateways --vllm-addresses",
        "BYTES": "--max-bytes --min-free-bytes --spool-bytes",
        "CHANNEL=CHOICE": "--sampling",
        "FILE": "--atropos-state --audit-log --config --keys-file --link-ca-file --link-secret-file --receipt "
        "--secret-file --spool --state --tls-cert --tls-key",
        "FOLDER": "--out --tokenizer-path",
        "FUNCTION": "--function --redact --reward",
        "HASH": "--seen",
        "JSON": "--options",
        "KEY": "--engine-key --key",
        "KEYS": "--control-keys",
        "MEGABYTES": "--memory-mb",
        "NAME=NUMBER": "--quota",
        "NAMES": "--allowed-hosts --forward-fields --media-hosts --other-models --trained-models",
        "NUMBER": "--seed",
        "PEOPLE": "--oidc-curators --oidc-viewers",
        "PATH": "--archive --from --journal --on --python --to --vllm-python",
        "PORT": "--dashboard-port --port",
        "REWARD": "--margin --reward-max --reward-min",
        "DURATION": "--older-than --retention",
        "SECONDS": "--completion-grace --group-deadline --session-idle --timeout",
        "SHARE": "--max-share-per-user --session-sample",
        "TEXT": "--reason",
        "TIME": "--expires --since --until",
        "TOKENS": "--prompt-length --response-length",
        "UID": "--trajectory",
        "VERSION": "--version --version-max --version-min",
        "VERSIONS": "--max-staleness",
    }.items()
    for flag in flags.split()
}
"""The placeholder that --help shows for a flag's value. A flag that is not listed takes what TYPES says of its type."""
TYPES: Mapping[str, str] = {"str": "NAME", "tuple[str,...]": "NAMES", "int": "COUNT", "float": "NUMBER"}
NO_DEFAULT = re.compile(r" \(default(?: factory)?: (?:None|False|\(\)|dict)\)$")
LISTED_DEFAULT = re.compile(r"\(default: \('([^']*)',\)\)$")


def split(value: object) -> object:
    return value.split(",") if isinstance(value, str) and value else value or ()


def _are_addresses(value: tuple[str, ...]) -> tuple[str, ...]:
    for address in value:
        if not address.startswith(("http://", "https://")):
            raise ValueError(f"{address!r} is not an address; write http://host:port,http://host:port")
    return tuple(address.rstrip("/") for address in value)


def _are_engine_addresses(value: tuple[str, ...]) -> tuple[str, ...]:
    for address in value:
        if address.startswith(DNS) and not DNS_ADDRESS.fullmatch(address):
            raise ValueError(f"{address!r} names no host and port; write dns://host:port")
    names = tuple(address for address in value if address.startswith(DNS))
    return (*_are_addresses(tuple(address for address in value if address not in names)), *names)


def _are_names(value: tuple[str, ...]) -> tuple[str, ...]:
    for name in value:
        if not HOST_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a name; write names of hosts without http:// and without a port")
    return value


def _is_ray_or_link(value: str) -> str:
    if value.startswith(LINK):
        read_host_and_port(value)
    return value


def _in_seconds(value: object) -> object:
    seconds = read_duration(value) if isinstance(value, str) else None
    return value if seconds is None else seconds


Duration = Annotated[float, BeforeValidator(_in_seconds), Field(gt=0)]
"""Seconds, or a number with s, m, h, d or w behind it."""
GROUP_SIZE = AliasChoices("group_size", "n_rollouts")
"""The names of the number of rollouts in a group."""
Listed = Annotated[tuple[str, ...], NoDecode, BeforeValidator(split)]
"""Values separated by commas."""
Addresses = Annotated[Listed, AfterValidator(_are_addresses)]
HostNames = Annotated[Listed, AfterValidator(_are_names)]
EngineAddresses = Annotated[Listed, AfterValidator(_are_engine_addresses)]
"""Addresses, and names that DNS lists engines under."""
Port = Annotated[int, Field(ge=0, le=65535, description="Port to listen on.")]


class Section(BaseSettings):
    """Settings. `env_prefix` in the line of a class begins the names of their environment variables."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        env_prefix_target="all",  # a setting named by an alias, --from or --json, has the prefix too
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_implicit_flags=True,
    )
    examples: ClassVar[tuple[str, ...]] = ()
    """Commands, for --help and the reference. A test reads each as the command would."""

    def __init_subclass__(cls, *, env_prefix: str | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        if env_prefix is not None:
            cls.model_config["env_prefix"] = env_prefix

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        cls.__doc__ = cleandoc(cls.__doc__ or "")  # the description in --help


class RaySection(Section):
    ray_address: str = "auto"
    """Ray's address, host:port; auto is the cluster on this machine."""
    ray_namespace: str = "default"
    """Ray namespace of the DataPool."""


class PoolSection(RaySection):
    data_pool_name: str = "data_pool"
    """Name of the DataPool's Ray actor."""


class ServerSection(PoolSection):
    ray_address: Annotated[str, AfterValidator(_is_ray_or_link)] = "auto"
    """Ray's address, host:port; auto is the cluster on this machine. link://host:port is a link that other machines
    reach (`stepwell link`): then this machine needs no Ray."""
    link_secret_file: str | None = None
    """File with the secret of the link that --ray-address names; the first of several is used."""
    link_ca_file: str | None = None
    """File with the CA, in PEM, of the certificate of that link; without it, the CAs that this system trusts."""
    control_keys: Listed = ()
    """Keys with full access, separated by commas: the current one first, then older ones. Without a key, access is
    open. Prefer the environment variable: other users can read a command line."""
    keys_file: str | None = None
    """File of further keys, with roles, as `stepwell keys create` writes it. A change takes effect within a second."""
    audit_log: str | None = None
    """File to which every control call is appended: when, by which key, and its result. Each server needs its own."""
    host: str = "127.0.0.1"
    """Address to listen on. One that other machines reach needs keys, or --insecure."""
    port: Port
    insecure: bool = False
    """Listen on any address without keys: everyone who reaches it may do everything."""
    allowed_hosts: HostNames = ()
    """Further names by which clients may ask this server, separated by commas. Without keys they must be listed; with
    keys any name will do, unless some are listed. Loopback and the --host itself always will."""
    tls_cert: str | None = None
    """File with the certificate, in PEM, to serve https; needs --tls-key."""
    tls_key: str | None = None
    """File with the key of the certificate, in PEM, not encrypted."""

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key belong together: give both, or none for http")
        return self

    @model_validator(mode="after")
    def _check_link(self) -> Self:
        if self.link is not None and self.link_secret_file is None:
            raise ValueError(
                f"--ray-address {self.ray_address} needs --link-secret-file, with the secret that the link was given"
            )
        if self.link is None and (self.link_secret_file or self.link_ca_file):
            raise ValueError("--link-secret-file and --link-ca-file belong to --ray-address link://host:port")
        return self

    @property
    def link(self) -> tuple[str, int] | None:
        """Host and port of a link over the network."""
        return read_host_and_port(self.ray_address) if self.ray_address.startswith(LINK) else None

    @property
    def scheme(self) -> str:
        return "http" if self.tls_cert is None else "https"

    @property
    def url(self) -> str:
        """The address on which the server listens."""
        return f"{self.scheme}://{self.host}:{self.port}"

    @property
    def local_url(self) -> str:
        """The address for clients on this machine."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"{self.scheme}://{host}:{self.port}"


S = TypeVar("S", bound=Section)


def read_settings(settings: type[S], argv: Sequence[str], command: str) -> S:
    """The settings from the environment and the flags. BadRequest has one line for each mistake."""
    try:
        flags = flags_of(settings, command)(args=with_dashes(argv))
        return settings(_cli_settings_source=flags)  # type: ignore[call-arg]  # BaseSettings takes it
    except ValidationError as wrong:
        raise BadRequest(explain_all(wrong.errors(), _flag, "\n")) from None


def flags_of(settings: type[Section], command: str) -> CliSettingsSource[Any]:
    """The reader of a command's flags. Its parser writes --help."""
    examples = (f"  {line}" for example in settings.examples for line in example.splitlines())
    parser = FlagParser(command, settings.__doc__, usage=None, epilog="\n".join(("examples:", *examples)))
    return CliSettingsSource[Any](settings, root_parser=parser, add_argument_method=_add_argument)


def _add_argument(parser: argparse.ArgumentParser, *names: str, **options: Any) -> None:
    metavar = options.get("metavar")
    if names[0].startswith("-") and metavar is not None and not metavar.startswith("{"):
        options["metavar"] = METAVARS.get(names[0], TYPES.get(metavar, metavar))
    if "help" in options:
        options["help"] = LISTED_DEFAULT.sub(r"(default: \1)", NO_DEFAULT.sub("", options["help"]))
    parser.add_argument(*names, **options)


def _flag(place: tuple[int | str, ...]) -> str:
    return "".join(f"--{str(name).replace('_', '-')}" for name in place[:1])
