"""The settings of a run on a Tinker service."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from stepwell.errors import BadRequest
from stepwell.trainers.algorithms import LossAggregation
from stepwell.trainers.settings import FeedSettings
from stepwell.trainers.tinker.datums import ServiceLoss

TinkerLoss: TypeAlias = Literal["importance_sampling", "ppo", "cispo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TinkerSettings(FeedSettings):
    """The settings of TinkerTrainer, with those of FeedSettings and RowSettings."""

    groups: int = 16
    """Groups per batch; trajectories or steps, if these are the unit."""
    temperature: float | None = 1.0
    """The service computes log-probabilities at temperature 1, so only what was sampled at it is trained."""
    rank: int = 16
    """The rank of a new adapter. Engines must take it: vLLM's --max-lora-rank."""
    loss: TinkerLoss = "importance_sampling"
    clip_low: float = 0.2
    clip_high: float = 0.28
    """How far a token's probability may have changed since it was sampled, with `ppo` and `cispo`."""
    loss_aggregation: LossAggregation = "token_mean"
    """The same as in Settings. It is part of the advantages that are sent."""
    fixed_length: int = 1024
    service_loss: ServiceLoss = "sum"
    """`sum`: the service adds the losses of all targets, as Tinker does, and SkyRL with FSDP or Megatron. `mean`: it
    takes the mean over each row's targets, then over the rows, as SkyRL with JAX. What is learned is the same."""
    learning_rate: float = 1e-4
    max_gradient_norm: float = 1.0
    """0: gradients are not clipped. SkyRL 0.4 never clips them."""
    updates: int = 100
    checkpoint_every: int = 1
    """Updates between states that the service saves. After a kill, what was trained since the last one is trained
    again, and nothing twice."""
    sync_every: int = 1
    """Updates between adapters for the engines."""
    rows_multiple: int = 1
    """An update has a multiple of so many rows; those that are added teach nothing. A service that compiles for each
    shape, as SkyRL with JAX, needs this."""
    logprob_tolerance: float = 0.1
    """How far the service's log-probabilities of what the newest adapter sampled may be from the engines', on average.
    SyncFailed if they are further: then the engines do not compute with the adapter that is trained."""

    def __post_init__(self) -> None:
        super(TinkerSettings, self).__post_init__()
        if self.temperature != 1.0:
            raise BadRequest("a Tinker service computes log-probabilities at temperature 1; sample at that")
