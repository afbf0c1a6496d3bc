"""Old log-probabilities of tokens that were recorded without them, computed by the trainer's model.

- A recorded log-probability is never replaced.
- A version is at hand if the model has its weights now, or if a copy of them is kept. Copies are made only after the
  first batch that lacks log-probabilities, and they are not in checkpoints: after a resume, only the weights of the
  checkpoint are at hand.
- Nothing is random: the model is in evaluation mode, as an engine is.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from stepwell.steps.layout import IndexArray
from stepwell.steps.step import BoolArray, FloatArray
from stepwell.trainers.learner import borrowed
from stepwell.trainers.policy_loss import token_logprobs
from stepwell.trainers.rows import TrainedRows
from stepwell.trainers.settings import Settings
from stepwell.trainers.transfers import TensorState

if TYPE_CHECKING:
    import torch

KEPT_VERSIONS = 2
"""Copies of weights, in the memory of the host: the last versions before the one that the model has."""


class OldPolicies:
    def __init__(self, model: "torch.nn.Module", settings: Settings) -> None:
        self._model = model
        self._settings = settings
        self._current: int | None = None
        """The version whose weights the model has; None if it has those of no version."""
        self._kept: dict[int, TensorState] = {}
        """Trainable weights, the oldest version first."""
        self._keeps = False

    def set_current(self, version: int | None) -> None:
        """The model's weights are what the engines serve as this version; None: they are not."""
        self._current = version

    def before_update(self) -> None:
        """The model's weights change now."""
        if self._keeps and self._current is not None:
            trainable = {name: of for name, of in self._model.named_parameters() if of.requires_grad}
            self._kept[self._current] = {name: of.detach().to("cpu", copy=True) for name, of in trainable.items()}
            for version in list(self._kept)[:-KEPT_VERSIONS]:
                del self._kept[version]
        self._current = None

    def fill(self, rows: TrainedRows) -> TrainedRows:
        """The rows with a log-probability for every trained token. Comes before `before_update`."""
        if not rows.missing.any():
            return rows
        is_recomputing = self._settings.old_logprobs == "recomputed"
        self._keeps |= is_recomputing
        logprobs, left, recomputed = rows.merged.logprobs.copy(), rows.missing.copy(), np.zeros_like(rows.missing)
        if is_recomputing:
            for version in np.unique(rows.merged.versions[rows.missing]).tolist():
                if version == self._current or version in self._kept:
                    of_version = rows.missing & (rows.merged.versions == version)
                    recomputed |= of_version
                    left &= ~of_version
                    self._compute(rows, of_version, logprobs, self._kept.get(version))
        self._compute(rows, left, logprobs, None)
        return replace(rows, merged=replace(rows.merged, logprobs=logprobs), recomputed=recomputed)

    def _compute(self, rows: TrainedRows, wanted: BoolArray, logprobs: FloatArray, weights: TensorState | None) -> None:
        """Writes the log-probabilities of the wanted tokens by these weights; None: by those of the model."""
        import torch

        model = self._model
        device = next(model.parameters()).device
        chosen, places = _rows_with(rows, wanted)
        part, computed = replace(rows, trained=wanted, chosen_R=chosen), [np.zeros(0, np.float32)]
        loaded = nullcontext() if weights is None else borrowed(model, {**model.state_dict(), **weights})
        with loaded, _evaluation(model), torch.no_grad():
            for each in part.passes(self._settings.tokens_per_pass):
                arrays = (each.ids_R_L, each.attention_R_L, each.trained_R_L, each.temperatures_N)
                found = token_logprobs(model, *(torch.from_numpy(array).to(device) for array in arrays))
                computed.append(found.cpu().numpy())
        logprobs[places] = np.concatenate(computed)


def _rows_with(rows: TrainedRows, wanted: BoolArray) -> tuple[IndexArray, IndexArray]:
    """The trained rows with such a token, in their order, and the places of the tokens in the order of passes."""
    starts = rows.merged.offsets_R
    places_R = {row: starts[row] + np.flatnonzero(wanted[starts[row] : starts[row + 1]]) for row in rows.chosen_R}
    chosen = [row for row, places in places_R.items() if len(places)]
    return np.array(chosen, np.int64), np.concatenate([np.zeros(0, np.int64), *(places_R[row] for row in chosen)])


@contextmanager
def _evaluation(model: "torch.nn.Module") -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, is_training in modes:
            module.training = is_training
