"""TRL's loss for tokens that were recorded without a log-probability: their ratio is 1, with the gradient that it has.

TRL subtracts the old log-probabilities from those of the model within `compute_loss`, and has no hook between. Old ones
that are missing are NaN up to there. Here they become 0, and the model's output gets the value 0 at the same places
and keeps its gradient. It is TRL's own pass, on whatever rank and packed as it is, so nothing is computed twice.
"""

import sys
from collections.abc import Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any

from stepwell.errors import BadRequest

if TYPE_CHECKING:
    import torch

TRAINER_MODULE = "trl.experimental.async_grpo.async_grpo_trainer"
MARK = "stepwell_counts_missing_logprobs"
USED = ("old_log_probs", "token_index")
"""The fields of a micro-batch that are used: for each trained token of each sample, what the model's output is compared
with, and where it is in that output. The places of padding are negative."""


def install() -> None:
    """Makes TRL's class compute with missing log-probabilities. Nothing changes for batches that have all."""
    module = sys.modules.get(TRAINER_MODULE)
    if module is None or hasattr(module.AsyncGRPOTrainer, MARK):
        return
    compute = module.AsyncGRPOTrainer.compute_loss

    @wraps(compute)
    def compute_loss(self: Any, model: "torch.nn.Module", inputs: Any, *args: Any, **options: Any) -> Any:
        if not all(name in inputs for name in USED):
            raise BadRequest(f"this TRL's micro-batches have no {' and '.join(USED)}; those of trl 1.16.0 have")
        if not inputs["old_log_probs"].isnan().any():
            return compute(self, model, inputs, *args, **options)
        known, places = known_logprobs(inputs)
        hook = model.register_forward_hook(lambda _model, _given, output: _start_from_0(output, places))
        try:
            return compute(self, model, {**inputs, "old_log_probs": known}, *args, **options)
        finally:
            hook.remove()

    module.AsyncGRPOTrainer.compute_loss = compute_loss
    setattr(module.AsyncGRPOTrainer, MARK, True)


def known_logprobs(inputs: "Mapping[str, torch.Tensor]") -> "tuple[torch.Tensor, torch.Tensor]":
    """The old log-probabilities, 0 for those that nobody knows, and the places of these in the model's output.

    Samples of a group that begin with the same tokens share their places. One that was recorded tells the old
    log-probability of the others at the same place: it is the same token after the same tokens.
    """
    import torch

    old, places = inputs["old_log_probs"].clone(), inputs["token_index"]
    is_missing = old.isnan() & (places >= 0)
    is_recorded = ~old.isnan() & (places >= 0)
    told = torch.full((int(places.max()) + 1,), torch.nan, dtype=old.dtype, device=old.device)
    told[places[is_recorded]] = old[is_recorded]
    old[is_missing] = told[places[is_missing]]
    is_missing = old.isnan()
    return old.nan_to_num(nan=0.0), places[is_missing]


def _start_from_0(output: Any, places: "torch.Tensor") -> None:
    flat = output.log_probs.flatten()
    is_free = flat.new_zeros(len(flat), dtype=bool)
    is_free[places] = True
    output.log_probs = (flat - flat.detach()).where(is_free, flat).view_as(output.log_probs)
