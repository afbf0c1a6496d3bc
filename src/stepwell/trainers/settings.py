"""The settings of a training run.

With the defaults, a model of a third of a million parameters learns on two CPU cores in a minute. A large model needs a
learning rate about a hundred times smaller.
"""

from dataclasses import dataclass

from stepwell.steps.advantages import AdvantageKind
from stepwell.steps.credit import CreditKind


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSettings:
    """What of a batch is trained, and towards what."""

    advantage: AdvantageKind = "rollout"
    """`rollout`: all tokens of a rollout have its advantage. `step`: a step reward counts for its own step alone.
    `reward_to_go`: it counts for its own step and those before it."""
    credit: CreditKind = "root"
    """How a rollout that forks is trained. `root`: every token has its advantage. `leaf`: it has it once for each leaf
    below it. `split`: it has the part of it that is the share of the trajectory's leaves below it."""
    temperature: float | None = None
    """If set, steps that were sampled at another temperature are left out; else every token is trained at its own."""
    assumed_temperature: float | None = None
    """The temperature of steps that do not tell theirs. If it is not set, they are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(RowSettings):
    groups: int = 16
    """Groups per batch."""
    channel: str = "train"
    updates: int = 120
    """Updates over which the learning rate falls, and the default of `run()`."""
    learning_rate: float = 5e-4
    final_rate: float = 0.1
    """The share of the learning rate that is left after the last update; it falls linearly."""
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
