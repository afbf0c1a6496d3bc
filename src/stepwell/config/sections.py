"""What all settings have in common, and how they are read: defaults < environment < flags.

An unknown key is an error. A field's docstring is its line in --help.
"""

from collections.abc import Sequence
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BeforeValidator, ValidationError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from stepwell.errors import BadRequest

S = TypeVar("S", bound=BaseSettings)


def split(value: object) -> object:
    return value.split(",") if isinstance(value, str) and value else value or ()


def _are_addresses(value: tuple[str, ...]) -> tuple[str, ...]:
    for address in value:
        if not address.startswith(("http://", "https://")):
            raise ValueError(f"{address!r} is no address; write http://host:port,http://host:port")
    return tuple(address.rstrip("/") for address in value)


Listed = Annotated[tuple[str, ...], NoDecode, BeforeValidator(split)]
"""Values separated by commas."""
Addresses = Annotated[Listed, AfterValidator(_are_addresses)]


class Section(BaseSettings):
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


class RaySection(Section):
    ray_address: str = "auto"
    """Ray's address, host:port; auto is the cluster on this machine."""
    ray_namespace: str = "default"
    """Ray namespace the DataPool lives in."""


def read_settings(settings: type[S], argv: Sequence[str], command: str) -> S:
    """The settings from the environment and the flags. BadRequest says what is wrong with them, a line each."""
    try:
        return settings(_cli_parse_args=list(argv), _cli_prog_name=command)
    except ValidationError as wrong:
        raise BadRequest("\n".join(_explained(error["loc"], error["msg"]) for error in wrong.errors())) from None


def _explained(where: tuple[int | str, ...], message: str) -> str:
    flag = "".join(f"--{str(name).replace('_', '-')}: " for name in where[:1])
    return flag + message.removeprefix("Value error, ")
