"""A model and its optimizer: one gradient step per minibatch, with gradients summed over as many passes as memory
needs."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepwell.common.imports import require
from stepwell.errors import BadRequest
from stepwell.trainers.algorithms import ALGORITHMS
from stepwell.trainers.policy_loss import (
    LogRatios,
    chosen_logprobs,
    entropies,
    kl_penalty,
    log_ratios,
    policy_loss,
    sequence_log_ratios,
    token_distributions,
    token_logprobs,
)
from stepwell.trainers.rows import MicroBatch, TrainedRows
from stepwell.trainers.settings import Settings, default_rate

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

log = logging.getLogger("stepwell.trainers")

BETAS = (0.9, 0.95)


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """The result of one batch; all but the loss and the last two are means over its trained tokens."""

    loss: float = 0.0
    """Over the tokens as `loss_aggregation` says; the mean of the minibatches."""
    ratio: float = 1.0
    """Importance ratio: how much likelier the tokens have become since they were sampled."""
    clipped: float = 0.0
    """The share of tokens that were clipped or capped."""
    outside_clip: float = 0.0
    """The share of tokens whose ratio is outside the clip, in whichever direction. The mean ratio stays near 1 even if
    the trainer computes with another temperature or other weights than the engine; this share does not stay near 0."""
    rollout_kl: float = 0.0
    """Estimated KL divergence of the trainer's distribution from the one that sampled the tokens."""
    entropy: float = 0.0
    """The entropy of the trainer's distribution at each token, in nats."""
    kl: float = 0.0
    """Estimated KL divergence from the reference; 0 without one."""
    gradient_norm: float = 0.0
    """The norm before clipping; the mean of the minibatches; 0 if there was nothing to train."""
    learning_rate: float = 0.0


class Learner:
    def __init__(self, model: "torch.nn.Module", reference: "torch.nn.Module | None", settings: Settings) -> None:
        require("torch", "train")
        from torch.optim import AdamW

        if settings.kl_coefficient and reference is None:
            raise BadRequest("a kl_coefficient needs a reference model: AsyncTrainer(…, reference=model)")
        self.model = model
        self.optimizer = AdamW(model.parameters(), betas=BETAS, weight_decay=0.0)
        self._reference = reference
        self._settings = settings
        self._full_rate = _full_rate(model) if settings.learning_rate is None else settings.learning_rate

    def reset_optimizer(self) -> None:
        """Drop the state of what was trained: the weights are others, which this optimizer has not trained."""
        self.optimizer.state.clear()

    def learn(self, rows: TrainedRows, update: int) -> Learned:
        """One gradient step per minibatch; none if there is nothing to train."""
        rate, settings = self.rate(update), self._settings
        if not rows.tokens:
            return Learned(learning_rate=rate)
        minibatches = [
            list(minibatch.passes(settings.tokens_per_pass, settings.loss_aggregation, settings.fixed_length))
            for minibatch in rows.minibatches(settings.minibatches)
        ]
        proximal: list[list[torch.Tensor | None]] = [[None] * len(parts) for parts in minibatches]
        if len(minibatches) > 1 and settings.importance_cap is not None:
            proximal = [[self._current_logprobs(part) for part in parts] for parts in minibatches]
        steps = [
            self._take_step(parts, before, rate, rows.tokens)
            for parts, before in zip(minibatches, proximal, strict=True)
        ]
        means = _added(steps)
        for name in ("loss", "gradient_norm"):
            means[name] /= len(steps)
        return Learned(**means, learning_rate=rate)

    def _take_step(
        self, parts: Sequence[MicroBatch], proximal: "Sequence[torch.Tensor | None]", rate: float, tokens: int
    ) -> dict[str, float]:
        """Trains a minibatch. Returns its loss, the norm of its gradient, and its share of the batch's means."""
        from torch.nn.utils import clip_grad_norm_

        self.optimizer.zero_grad()
        sequence_ratios: Sequence[LogRatios | None] = [None] * len(parts)
        if ALGORITHMS[self._settings.algorithm].by_sequence:
            sequence_ratios = self._sequence_ratios(parts, proximal)
        passes = [
            self._backward(part, before, ratios, tokens)
            for part, before, ratios in zip(parts, proximal, sequence_ratios, strict=True)
        ]
        norm = clip_grad_norm_(self.model.parameters(), self._settings.max_gradient_norm, error_if_nonfinite=True)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        return _added(passes) | {"gradient_norm": norm.item()}

    def rate(self, update: int) -> float:
        """The learning rate after that many updates. It rises with the steps of the optimizer, also after a reset."""
        settings = self._settings
        done = min(update / settings.updates, 1.0)
        risen = min((self._optimizer_steps() / settings.minibatches + 1) / (settings.warmup_updates + 1), 1.0)
        return self._full_rate * risen * (1.0 - (1.0 - settings.final_rate) * done)

    def _optimizer_steps(self) -> float:
        known = next(iter(self.optimizer.state.values()), None)
        return 0.0 if known is None else float(known["step"])

    def _inputs(self, part: MicroBatch) -> "list[torch.Tensor]":
        return self._tensors(part.ids_R_L, part.attention_R_L, part.trained_R_L, part.temperatures_N)

    def _tensors(self, *arrays: "NDArray[np.generic]") -> "list[torch.Tensor]":
        import torch

        device = next(self.model.parameters()).device
        return [torch.from_numpy(array).to(device) for array in arrays]

    def _current_logprobs(self, part: MicroBatch) -> "torch.Tensor":
        import torch

        with torch.no_grad():
            return token_logprobs(self.model, *self._inputs(part))

    def _sequence_ratios(
        self, parts: Sequence[MicroBatch], proximal: "Sequence[torch.Tensor | None]"
    ) -> list[LogRatios]:
        """A pass does not see all tokens of a sequence, so they are computed before all passes."""
        of_parts = []
        for part, before in zip(parts, proximal, strict=True):
            (recorded_N,) = self._tensors(part.recorded_N)
            of_parts.append(log_ratios(self._current_logprobs(part), recorded_N, before))
        return sequence_log_ratios(of_parts, [part.sequences_N for part in parts])

    def _backward(
        self, part: MicroBatch, proximal_N: "torch.Tensor | None", sequence_ratios: LogRatios | None, tokens: int
    ) -> dict[str, float]:
        """Adds the gradients of one pass; returns its part of the loss, and its share of the batch's means."""
        import torch

        settings, inputs = self._settings, self._inputs(part)
        recorded_N, advantages_N, weights_N = self._tensors(part.recorded_N, part.advantages_N, part.weights_N)
        distributions_N_V = token_distributions(self.model, *inputs)
        logprobs_N = chosen_logprobs(distributions_N_V, inputs[0], inputs[2])
        ratios = sequence_ratios or log_ratios(logprobs_N, recorded_N, proximal_N)
        policy = policy_loss(logprobs_N, ratios, advantages_N, settings)
        kl_N = torch.zeros_like(logprobs_N)
        if self._reference is not None:
            with torch.no_grad():
                reference_N = token_logprobs(self._reference, *inputs)
            kl_N = kl_penalty(logprobs_N, reference_N)
        losses_N = policy.losses_N + settings.kl_coefficient * kl_N
        loss = (losses_N * weights_N).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        shares = {
            "ratio": policy.ratios_N,
            "clipped": policy.clipped_N,
            "outside_clip": (policy.ratios_N < 1 - settings.clip_low) | (policy.ratios_N > 1 + settings.clip_high),
            "rollout_kl": kl_penalty(recorded_N, logprobs_N.detach()),
            "entropy": entropies(distributions_N_V),
            "kl": kl_N,
        }
        return {"loss": loss.item()} | {name: share.sum().item() / tokens for name, share in shares.items()}


def _full_rate(model: "torch.nn.Module") -> float:
    """The learning rate of a model for which none is set."""
    parameters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    rate = default_rate(parameters)
    text = "no learning_rate is set: %g is used, by the model's %s trainable parameters (docs/training.md)"
    log.warning(text, rate, f"{parameters:,}")
    return rate


def _added(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: sum(part[name] for part in parts) for name in parts[0]}
