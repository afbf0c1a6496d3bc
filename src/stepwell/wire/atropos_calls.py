"""Small bodies of Atropos' protocol, for the server and for environments."""

from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from stepwell.common.user_input import explain_all
from stepwell.errors import BadRequest

M = TypeVar("M", bound=BaseModel)
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""A number that any reader of JSON can read."""


class AtroposBody(BaseModel):
    model_config = ConfigDict(frozen=True)


class TrainerRegistration(AtroposBody):
    wandb_group: str
    wandb_project: str
    batch_size: Annotated[Whole, Field(ge=1)]
    """Sequences in a batch."""
    max_token_len: Whole
    checkpoint_dir: str
    save_checkpoint_interval: Whole
    starting_step: Whole
    num_steps: Whole


class EnvRegistration(AtroposBody):
    max_token_length: Whole
    desired_name: str
    weight: FiniteFloat
    group_size: Annotated[Whole, Field(ge=1)]
    min_batch_allocation: Annotated[float, Field(ge=0, le=1)] | None = None
    """The share of each batch that must come from this environment, as far as it has groups."""
    temperature: FiniteFloat | None = None
    """The temperature of its sequences, where neither they nor their group tell one."""


class EnvRegistered(AtroposBody):
    """The answer to an EnvRegistration, once the trainer has started."""

    env_id: int
    wandb_name: str
    checkpoint_dir: str
    starting_step: int
    checkpoint_interval: int
    num_steps: int


class EnvStatus(AtroposBody):
    """The status by which an environment decides how many rollouts to start. The defaults are for servers that say
    less."""

    current_step: int
    queue_size: int
    """All ready sequences, without what other environments' minimums claim, in groups of this environment's size."""
    unallocated_fraction: float = 1.0
    """The share of a batch that no minimum claims."""
    self_queue_size: int = 0
    """Groups of this environment."""
    max_group_size: int = 1
    env_weight: float = 1.0


class EnvIdentifier(AtroposBody):
    env_id: int


class LeaseName(AtroposBody):
    lease: str
    """The lease, as in the header x-stepwell-lease."""


def read_call(shape: type[M], sent: bytes | dict[str, str]) -> M:
    """Reads a JSON body, or a query. BadRequest says what is wrong with it."""
    try:
        return shape.model_validate_json(sent) if isinstance(sent, bytes) else shape.model_validate(sent)
    except ValidationError as wrong:
        raise BadRequest(explain_all(wrong.errors())) from None
