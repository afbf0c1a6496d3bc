"""New weights for engines that keep serving: pause, load, set the version, resume, and then check the result.

Invariants:
- Every engine is resumed, whatever fails.
- Calls in progress are held, never broken off.
- There is one sync at a time.
- The pool gets the new version only when every engine reports it and computes with its weights.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import numpy as np

from stepwell.engines import ENGINES
from stepwell.engines.engine import EngineControl
from stepwell.errors import BadRequest, SyncFailed
from stepwell.trainers.grpo import token_logprobs
from stepwell.trainers.ports import VersionedPool
from stepwell.trainers.transfers import Transfer, Weights, on_each

if TYPE_CHECKING:
    import torch

log = logging.getLogger("stepwell.trainers")

PROBE = tuple(range(16))
"""Every vocabulary has these ids."""
TOLERANCE = 1e-3
"""Enough for an engine in float32. One in bfloat16 was measured 0.19 off, and needs that much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    version: int
    seconds: float
    paused_seconds: float
    """How long the engines were paused."""
    logprob_gap: float | None
    """The largest difference between an engine's log-probabilities of the probe and the trainer's; None without a
    probe."""


class WeightSync:
    """Brings weights to all `engines` (their addresses, not the gateway's), and sets their version in `pool`.

    `probe` are token ids whose log-probabilities are compared after every sync; with `()` nothing is compared.
    `engine_key` is the engines' API key (vLLM's --api-key), `timeout` the seconds that one call to an engine may take,
    `engine_kind` the name of their kind. Calls block, and may come from any thread.
    """

    def __init__(
        self,
        engines: Sequence[str],
        *,
        transfer: Transfer,
        pool: VersionedPool | None = None,
        probe: Sequence[int] = PROBE,
        tolerance: float = TOLERANCE,
        engine_key: str | None = None,
        timeout: float = 60.0,
        engine_kind: str = "vllm",
    ) -> None:
        if not engines:
            raise BadRequest("a WeightSync needs the address of at least one engine")
        if len(probe) == 1:
            raise BadRequest("a probe has two token ids or more: the first has no log-probability")
        kinds = {kind.name: kind for kind in ENGINES}
        if engine_kind not in kinds:
            raise BadRequest(f"no engine kind is called {engine_kind!r}; there are: {', '.join(kinds)}")
        self._engines = [kinds[engine_kind].control(url, key=engine_key, timeout=timeout) for url in engines]
        self._transfer = transfer
        self._pool = pool
        self._probe = list(probe)
        self._tolerance = tolerance
        self._one_at_a_time = threading.Lock()

    def sync(self, weights: "torch.nn.Module | Weights", version: int) -> SyncReport:
        """Returns once every engine computes with these weights under this version; SyncFailed if one does not.

        Without a probe, `weights` may be tensors by name instead of a model.
        """
        if self._probe and not _is_model(weights):
            raise BadRequest("log-probabilities are compared with the model's: sync the model, or pass probe=()")
        with self._one_at_a_time, self._transfer.exclusive():
            began = time.monotonic()
            self._transfer.prepare(_named(weights), self._engines)
            paused_seconds = self._change(version)
            self._check_version(version)
            gap = self._check_logprobs(weights, version) if _is_model(weights) and self._probe else None
            if self._pool is not None:
                self._pool.set_policy_version(version)
            seconds = time.monotonic() - began
        return SyncReport(version=version, seconds=seconds, paused_seconds=paused_seconds, logprob_gap=gap)

    def _change(self, version: int) -> float:
        began = time.monotonic()
        try:
            on_each(self._engines, lambda engine: engine.pause())
            self._transfer.update(self._engines)
            on_each(self._engines, lambda engine: engine.set_version(version))
            on_each(self._engines, lambda engine: engine.forget_prefixes())
        finally:
            stuck = [why for why in on_each(self._engines, _why_not_resumed) if why]
            for text in stuck:
                log.error("an engine may still be paused: %s", text)
        if stuck:
            raise SyncFailed(f"an engine may still be paused; POST /resume there: {'; '.join(stuck)}")
        return time.monotonic() - began

    def _check_version(self, version: int) -> None:
        for engine, told in zip(self._engines, on_each(self._engines, lambda engine: engine.version()), strict=True):
            if told != str(version):
                raise SyncFailed(f"{engine.url} was given version {version} and says it has {told}")

    def _check_logprobs(self, model: "torch.nn.Module", version: int) -> float:
        ours = probe_logprobs(model, self._probe)
        theirs = on_each(self._engines, lambda engine: engine.logprobs(self._probe))
        gaps = [float(np.abs(np.subtract(told, ours)).max()) for told in theirs]
        for engine, gap in zip(self._engines, gaps, strict=True):
            if not gap <= self._tolerance:
                raise SyncFailed(
                    f"{engine.url} does not compute with the weights of version {version}: its log-probabilities are "
                    f"up to {gap:.3g} off the trainer's, and {self._tolerance:g} is allowed. On a CPU, vLLM keeps "
                    f"packed copies of its first weights unless a worker extension prevents it; an engine in a "
                    f"lower precision than the trainer needs WeightSync(tolerance=…); else it got other weights"
                )
        return max(gaps)


def probe_logprobs(model: "torch.nn.Module", ids: Sequence[int]) -> list[float]:
    """The log-probability of each token but the first, without dropout."""
    import torch

    row = torch.tensor([list(ids)], device=next(model.parameters()).device)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        found = token_logprobs(model, row, torch.ones_like(row), torch.ones_like(row, dtype=torch.bool), 1.0)
    model.train(was_training)
    return [float(logprob) for logprob in found.tolist()]


def _is_model(weights: "torch.nn.Module | Weights") -> "TypeGuard[torch.nn.Module]":
    return not isinstance(weights, Mapping)


def _named(weights: "torch.nn.Module | Weights") -> Weights:
    """By name, each tensor once: tied embeddings are one tensor with two names, and an engine ties them itself."""
    if not _is_model(weights):
        return weights  # type: ignore[return-value]
    seen: set[tuple[int, tuple[int, ...]]] = set()
    named: dict[str, torch.Tensor] = {}
    for name, tensor in weights.state_dict().items():
        place = (tensor.data_ptr(), tuple(tensor.shape))
        if place not in seen:
            seen.add(place)
            named[name] = tensor
    return named


def _why_not_resumed(engine: EngineControl) -> str | None:
    try:
        engine.resume()
    except SyncFailed as failure:
        return str(failure)
    return None
