"""The settings of a training run.

With the defaults, a model of a third of a million parameters learns on two CPU cores in a minute. A large model needs a
learning rate about a hundred times smaller.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from stepwell.errors import BadRequest
from stepwell.steps.advantages import AdvantageKind
from stepwell.steps.baselines import BaselineKind
from stepwell.steps.credit import CreditKind
from stepwell.trainers.aggregation import LossAggregation

TrainingUnit: TypeAlias = Literal["groups", "trajectories", "steps"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSettings:
    """What of a batch is trained, and towards what."""

    unit: TrainingUnit = "groups"
    """What a batch is made of. `groups`: whole ones. `trajectories`: single ones, as soon as they are complete.
    `steps`: single ones, before their trajectory ends. Each trajectory or step is then a group of one."""
    advantage: AdvantageKind = "rollout"
    """`rollout`: all tokens of a rollout have its advantage. `step`: a step reward counts for its own step alone.
    `reward_to_go`: it counts for its own step and those before it."""
    baseline: BaselineKind = "group"
    """With what a rollout is compared. `group`: the rollouts of its group. `leave_one_out`: the others of its group.
    `batch`: all rollouts of the batch. `running`: those of earlier batches. `none`: nothing."""
    fallback_baseline: BaselineKind = "running"
    """The baseline of groups of one, if `baseline` compares within groups; `none`: they are not trained."""
    divide_by_std: bool = True
    """Are advantages divided by the standard deviation of what is compared? False: Dr. GRPO."""
    baseline_key: str | None = None
    """A field of the metadata that names the task of a rollout: `running` then has a mean for each task."""
    credit: CreditKind = "root"
    """How a rollout that forks is trained. `root`: every token has its advantage. `leaf`: it has it once for each leaf
    below it. `split`: it has the part of it that is the share of the trajectory's leaves below it."""
    temperature: float | None = None
    """If set, steps that were sampled at another temperature are left out; else every token is trained at its own."""
    assumed_temperature: float | None = None
    """The temperature of steps that do not tell theirs. If it is not set, they are left out."""

    def __post_init__(self) -> None:
        if self.unit == "steps" and self.advantage == "rollout":
            raise BadRequest(
                "with unit='steps', advantage is step or reward_to_go: a step is trained before the return is known"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(RowSettings):
    groups: int = 16
    """Groups per batch; trajectories or steps, if these are the unit."""
    channel: str = "train"
    updates: int = 120
    """Updates over which the learning rate falls, and the default of `run()`."""
    learning_rate: float = 5e-4
    final_rate: float = 0.1
    """The share of the learning rate that is left after the last update; it falls linearly."""
    warmup_updates: int = 0
    """Updates over which the learning rate rises at the beginning and after a rollback. Adam's first steps are as large
    as the rate, however small the gradient: a high rate spoils the model at once."""
    max_gradient_norm: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.28
    """A token whose probability has changed by more than these shares since it was sampled, in the direction of its
    advantage, gets no gradient."""
    dual_clip: float = 3.0
    """The largest weight of a token with a negative advantage, however much likelier it has become."""
    importance_cap: float | None = None
    """If set, tokens are weighted by their importance ratio, up to this, instead of clipped: for data that is many
    versions old, of which clipping would leave little."""
    kl_coefficient: float = 0.0
    """The weight of the KL penalty towards the reference model, which must be given if this is not 0."""
    loss_aggregation: LossAggregation = "token_mean"
    """How the tokens' losses become one. `token_mean`: their mean. `sequence_mean`: the mean over rollouts of the mean
    over each one's tokens. `fixed_length`: the mean over rollouts of the sum over tokens, divided by `fixed_length`."""
    fixed_length: int = 1024
    """Tokens; by what `fixed_length` divides."""
    max_unlearnable: int | None = 20
    """Batches in a row from which nothing can be learned before the run stops with `NothingLearned`; None: never."""
    tokens_per_pass: int = 16_384
    """Tokens in one pass of the model, with padding; the gradients of several passes are summed into one update."""
    fetch_timeout: float = 600.0
    """Seconds to wait for a batch."""
    lease: float = 600.0
    """Seconds until a batch's lease expires if the pool hears no heartbeats. The client sends them while it lives."""
    checkpoint_every: int = 1
    """Updates between checkpoints. After a crash, what was trained since the last one is trained again."""
    sync_every: int = 1
    """Updates between syncs of the engines' weights."""
