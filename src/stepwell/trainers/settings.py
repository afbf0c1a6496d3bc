"""What a training run may be told.

With the defaults a model of a third of a million parameters was seen to learn on two CPU cores in a minute; a large one
wants a learning rate some hundred times smaller.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    groups: int = 16
    """Groups a batch."""
    channel: str = "train"
    updates: int = 120
    """Over how many updates the learning rate falls, and what `run()` runs to unless told otherwise."""
    learning_rate: float = 5e-4
    final_rate: float = 0.1
    """The share of the learning rate that is left after the last update; it falls in a straight line."""
    max_gradient_norm: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.28
    """A token whose probability has moved by more than these shares since it was sampled, the way its advantage asks
    for, is left alone."""
    dual_clip: float = 3.0
    """The most that a token with a negative advantage counts for, however much likelier it has become."""
    importance_cap: float | None = None
    """With a number, tokens are weighted by how much likelier they have become, up to this, rather than left alone
    beyond the clip: for data that is many versions old, of which clipping would leave little."""
    kl_coefficient: float = 0.0
    """The pull towards the reference model, which must be given if this is not 0."""
    temperature: float = 1.0
    """That of the samples. A batch that was sampled at another is refused, for its ratios would be wrong."""
    tokens_per_pass: int = 16_384
    """Tokens in one pass of the model, padding included; gradients of several passes are summed into one update."""
    fetch_timeout: float = 600.0
    """Seconds to wait for a batch."""
    lease: float = 600.0
    """Seconds a batch is ours. It is acknowledged with the next checkpoint, which must be written before then."""
    checkpoint_every: int = 1
    """Updates between checkpoints. What was trained since the last is trained again after a crash."""
    sync_every: int = 1
    """Updates between two syncs of the engines' weights."""
