"""Small bodies of Atropos' protocol, and the state that the Atropos server keeps over a restart."""

from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from stepwell.errors import BadRequest

M = TypeVar("M", bound=BaseModel)


class AtroposBody(BaseModel):
    model_config = ConfigDict(frozen=True)


class TrainerRegistration(AtroposBody):
    wandb_group: str
    wandb_project: str
    batch_size: Annotated[int, Field(ge=1)]
    """Sequences in a batch."""
    max_token_len: int
    checkpoint_dir: str
    save_checkpoint_interval: int
    starting_step: int
    num_steps: int


class EnvRegistration(AtroposBody):
    max_token_length: int
    desired_name: str
    weight: FiniteFloat
    group_size: Annotated[int, Field(ge=1)]
    min_batch_allocation: Annotated[float, Field(ge=0, le=1)] | None = None
    """The share of each batch that must come from this environment, as far as it has groups."""


class EnvIdentifier(AtroposBody):
    env_id: int


class LeaseName(AtroposBody):
    lease: str
    """As in the header x-stepwell-lease."""


class EnvironmentState(AtroposBody):
    """An environment in the state file."""

    name: str
    wanted: EnvRegistration
    is_disconnected: bool


class ChannelState(AtroposBody):
    """A channel's trainer and environments in the state file."""

    trainer: TrainerRegistration | None
    is_started: bool
    step: int
    environments: tuple[EnvironmentState, ...]


class RegistryState(AtroposBody):
    """The state file."""

    channels: dict[str, ChannelState]


def read_call(shape: type[M], body: bytes) -> M:
    """BadRequest says what is wrong with the body."""
    try:
        return shape.model_validate_json(body)
    except ValidationError as wrong:
        faults = (f"{'.'.join(map(str, error['loc']))}: {error['msg']}".removeprefix(": ") for error in wrong.errors())
        raise BadRequest("; ".join(faults)) from None
