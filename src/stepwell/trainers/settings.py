"""The settings of a training run, and the learning rate of a model for which none is set."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from stepwell.errors import BadRequest
from stepwell.steps.advantages import AdvantageKind, BaselineKind
from stepwell.steps.credit import CreditKind
from stepwell.trainers.algorithms import ALGORITHMS, AlgorithmDefaults, AlgorithmKind, LossAggregation

TrainingUnit: TypeAlias = Literal["groups", "trajectories", "steps"]
ImportanceSampling: TypeAlias = Literal["truncated", "masked"]
OldLogprobs: TypeAlias = Literal["recorded", "recomputed", "current"]
BY_ALGORITHM: Any = object()
"""The default of a setting whose value is that of the algorithm."""
DEFAULT_RATES = ((1e6, 5e-4), (1e7, 5e-5), (1e8, 1e-5), (1e9, 3e-6))
"""Numbers of trainable parameters, with the learning rate of models that have at most so many."""
SMALLEST_RATE = 1e-6
"""The learning rate of larger models."""


def default_rate(parameters: int) -> float:
    """A learning rate to begin with: the more parameters are trained, the smaller. An adapter counts alone."""
    return next((rate for most, rate in DEFAULT_RATES if parameters <= most), SMALLEST_RATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSettings:
    """The rows of a batch that are trained, and towards what."""

    unit: TrainingUnit = "groups"
    """The units that a batch is made of. `groups`: whole ones. `trajectories`: single ones, as soon as they are
    complete. `steps`: single ones, before their trajectory ends. Each trajectory or step is then a group of one."""
    advantage: AdvantageKind = "rollout"
    """`rollout`: all tokens of a rollout have its advantage. `step`: a step reward counts for its own step alone.
    `reward_to_go`: it counts for its own step and those before it."""
    baseline: BaselineKind = "group"
    """The baseline that a rollout is compared with. `group`: the rollouts of its group. `leave_one_out`: the others of
    its group. `batch`: all rollouts of the batch. `running`: those of earlier batches. `none`: nothing."""
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
    assumed_temperature: float | None = 1.0
    """The temperature of steps that do not tell theirs. None: they are left out."""
    old_logprobs: OldLogprobs | None = None
    """The old log-probabilities of tokens that were recorded without them. `recorded`: there are none, and rollouts
    with such tokens are left out. `recomputed`: those of the weights that sampled the token if the trainer still has
    them, else as `current`. `current`: those of the weights that are trained, before the batch changes them, so the
    ratio is 1 at first. None: the first of `recomputed`, `current` and `recorded` that the trainer can do."""
    filter_overlong: bool = False
    """Are rollouts left out whose last step did not come to its end? It reached its largest length, or its agent did
    not read on. They count in the baseline."""

    def __post_init__(self) -> None:
        if self.old_logprobs not in (None, *get_args(OldLogprobs)):
            raise BadRequest(
                f"old_logprobs is one of {', '.join(get_args(OldLogprobs))}, or None, not {self.old_logprobs!r}"
            )
        if self.unit == "steps" and self.advantage == "rollout":
            raise BadRequest(
                "with unit='steps', advantage is step or reward_to_go: a step is trained before the return is known"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedSettings(RowSettings):
    """How batches are leased, with the settings of their rows, RowSettings."""

    channel: str = "train"
    fetch_timeout: float = 600.0
    """Seconds to wait for a batch."""
    lease: float = 600.0
    """Seconds until a batch's lease expires if the pool hears no heartbeats. The client sends them while it lives."""
    max_unlearnable: int | None = 20
    """Batches in a row from which nothing can be learned before the run stops with `NothingLearned`; None: never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(FeedSettings):
    """The settings of AsyncTrainer, with those of FeedSettings and RowSettings."""

    algorithm: AlgorithmKind = "grpo"
    """The objective, and the default of the settings that belong to it (trainers/algorithms.py): `baseline`,
    `divide_by_std`, `loss_aggregation`, `clip_low`, `clip_high` and `importance_cap`."""
    baseline: BaselineKind = BY_ALGORITHM
    divide_by_std: bool = BY_ALGORITHM
    groups: int = 16
    """Groups per batch; trajectories or steps, if these are the unit."""
    updates: int = 120
    """Updates over which the learning rate falls, and the default of `run()`."""
    learning_rate: float | None = None
    """The rate of AdamW. None: `default_rate` of the model, by the number of its trainable parameters."""
    final_rate: float = 0.1
    """The share of the learning rate that is left after the last update; it falls linearly."""
    warmup_updates: int = 0
    """Updates over which the learning rate rises at the beginning and after a rollback. Adam's first steps are as large
    as the rate, however small the gradient: a high rate spoils the model at once."""
    max_gradient_norm: float = 1.0
    minibatches: int = 1
    """Gradient steps per batch, each on a part of its rollouts. Log-probabilities of the weights before the first one,
    the proximal policy, are computed if there is an `importance_cap`."""
    clip_low: float = BY_ALGORITHM
    clip_high: float = BY_ALGORITHM
    """A token whose probability has changed by more than these shares since it was sampled, in the direction of its
    advantage, gets no gradient. For `gspo`, its rollout's probability per token counts; `cispo` clips its weight."""
    dual_clip: float = 3.0
    """The largest weight of a token with a negative advantage, however much likelier it has become."""
    importance_cap: float | None = BY_ALGORITHM
    """If set, tokens are weighted by their importance ratio, up to this, and only what the gradient steps of one batch
    change is clipped: for data that is many versions old, of which clipping would leave little."""
    importance_sampling: ImportanceSampling = "truncated"
    """The treatment of a larger ratio than `importance_cap`. `truncated`: it counts as the cap. `masked`: the token is
    not trained."""
    kl_coefficient: float = 0.0
    """The weight of the KL penalty towards the reference model, which must be given if this is not 0."""
    loss_aggregation: LossAggregation = BY_ALGORITHM
    """How the tokens' losses become one. `token_mean`: their mean. `sequence_mean`: the mean over rollouts of the mean
    over each one's tokens. `fixed_length`: the mean over rollouts of the sum over tokens, divided by `fixed_length`."""
    fixed_length: int = 1024
    """Tokens; by what `fixed_length` divides."""
    max_refills: int = 0
    """Dynamic sampling: how often an update may fetch more groups in place of those that teach nothing."""
    tokens_per_pass: int = 16_384
    """Tokens in one pass of the model, with padding; the gradients of several passes are summed into one update."""
    checkpoint_every: int = 1
    """Updates between checkpoints. After a crash, what was trained since the last one is trained again."""
    sync_every: int = 1
    """Updates between syncs of the engines' weights."""
    _filled_for: AlgorithmKind | None = field(default=None, repr=False)
    """The algorithm whose values are filled in. `dataclasses.replace` passes it on, so that another algorithm does not
    get them unnoticed."""

    def __post_init__(self) -> None:
        RowSettings.__post_init__(self)
        if self.algorithm not in ALGORITHMS:
            raise BadRequest(f"algorithm is one of {', '.join(ALGORITHMS)}, not {self.algorithm!r}")
        if self._filled_for not in (None, self.algorithm):
            raise BadRequest(
                f"these settings have the values of {self._filled_for}; make new ones: "
                f"Settings(algorithm={self.algorithm!r}, …)"
            )
        defaults = ALGORITHMS[self.algorithm].defaults
        for name in (decided.name for decided in fields(AlgorithmDefaults)):
            if getattr(self, name) is BY_ALGORITHM:
                object.__setattr__(self, name, getattr(defaults, name))
        object.__setattr__(self, "_filled_for", self.algorithm)
        self._check_importance()
        if self.minibatches < 1 or self.max_refills < 0:
            raise BadRequest("minibatches is at least 1, and max_refills at least 0")

    def _check_importance(self) -> None:
        if self.importance_sampling not in get_args(ImportanceSampling):
            kinds = ", ".join(get_args(ImportanceSampling))
            raise BadRequest(f"importance_sampling is one of {kinds}, not {self.importance_sampling!r}")
        if self.importance_sampling == "masked" and self.importance_cap is None:
            raise BadRequest("importance_sampling='masked' needs an importance_cap: a larger ratio is not trained")


S = TypeVar("S", bound=RowSettings)


def choose_old_logprobs(settings: S, able: Sequence[OldLogprobs], reason: str) -> S:
    """The settings with a value of `old_logprobs` that the trainer is able to do, the first if none is set. `reason`
    says why it cannot do the others."""
    if settings.old_logprobs is None:
        return replace(settings, old_logprobs=able[0])
    if settings.old_logprobs not in able:
        raise BadRequest(f"old_logprobs={settings.old_logprobs!r}: {reason}. Set it to {' or '.join(able)}")
    return settings
