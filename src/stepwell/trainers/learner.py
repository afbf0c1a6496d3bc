"""A model and its optimizer: one gradient step per batch, with gradients summed over as many passes as memory needs."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepwell.common.optional import require
from stepwell.errors import BadRequest
from stepwell.trainers.grpo import kl_penalty, policy_loss, token_logprobs
from stepwell.trainers.rows import Pass, TrainedRows
from stepwell.trainers.settings import Settings

if TYPE_CHECKING:
    import torch

BETAS = (0.9, 0.95)


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """The result of one batch; all but the last two are means over its trained tokens."""

    loss: float = 0.0
    ratio: float = 1.0
    """Importance ratio: how much likelier the tokens have become since they were sampled."""
    clipped: float = 0.0
    """The share of tokens that were clipped or capped."""
    kl: float = 0.0
    """Estimated KL divergence from the reference; 0 without one."""
    gradient_norm: float = 0.0
    """Before clipping; 0 if there was nothing to train."""
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

    def learn(self, rows: TrainedRows, update: int) -> Learned:
        """One gradient step; none if there is nothing to train."""
        from torch.nn.utils import clip_grad_norm_

        rate = self.rate(update)
        if not rows.tokens:
            return Learned(learning_rate=rate)
        self.optimizer.zero_grad()
        passes = [self._backward(part, rows.tokens) for part in rows.passes(self._settings.tokens_per_pass)]
        norm = clip_grad_norm_(self.model.parameters(), self._settings.max_gradient_norm, error_if_nonfinite=True)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        loss, ratio, clipped, kl = (sum(shares) for shares in zip(*passes, strict=True))
        return Learned(loss=loss, ratio=ratio, clipped=clipped, kl=kl, gradient_norm=norm.item(), learning_rate=rate)

    def rate(self, update: int) -> float:
        """The learning rate after that many updates."""
        settings = self._settings
        done = min(update / settings.updates, 1.0)
        return settings.learning_rate * (1.0 - (1.0 - settings.final_rate) * done)

    def _backward(self, part: Pass, tokens: int) -> tuple[float, ...]:
        """Adds the gradients of one pass; returns its share of the batch's loss, ratio, clipped and kl."""
        import torch

        device = next(self.model.parameters()).device
        arrays = (part.ids_R_L, part.attention_R_L, part.trained_R_L, part.recorded_N, part.advantages_N)
        ids, attention, trained, recorded, advantages = (torch.from_numpy(array).to(device) for array in arrays)
        logprobs_N = token_logprobs(self.model, ids, attention, trained, self._settings.temperature)
        policy = policy_loss(logprobs_N, recorded, advantages, self._settings)
        kl_N = torch.zeros_like(logprobs_N)
        if self._reference is not None:
            with torch.no_grad():
                reference_N = token_logprobs(self._reference, ids, attention, trained, self._settings.temperature)
            kl_N = kl_penalty(logprobs_N, reference_N)
        losses_N = policy.losses_N + self._settings.kl_coefficient * kl_N
        (losses_N.sum() / tokens).backward()  # type: ignore[no-untyped-call]
        shares = (losses_N, policy.ratios_N, policy.clipped_N, kl_N)
        return tuple(share.sum().item() / tokens for share in shares)
