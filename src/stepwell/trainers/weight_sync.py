"""New weights for engines that keep serving: pause, load, set the version, resume, and then check the result.

Invariants:
- Calls in progress are held. They are broken off only at an engine whose weights are then unknown.
- There is one sync at a time.
- An engine has the new version only if it computes with its weights; the pool gets it if at least one engine has it.
- The engines are those of the pool's list at that moment. One that joins, restarts or fails gets the weights of the
  last sync in the background, before gateways use it.
"""

import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeGuard

import numpy as np

from stepwell.engines import ENGINES
from stepwell.engines.engine import EngineControl
from stepwell.errors import BadRequest, StepwellError, SyncFailed
from stepwell.trainers.grpo import token_logprobs
from stepwell.trainers.ports import VersionedPool
from stepwell.trainers.sync_round import SyncRound, break_off
from stepwell.trainers.transfers import Transfer, Weights

if TYPE_CHECKING:
    import torch

log = logging.getLogger("stepwell.trainers")

PROBE = tuple(range(16))
"""Every vocabulary has these ids."""
TOLERANCE = 1e-3
"""Enough for an engine in float32. One in bfloat16 was measured 0.19 off, and needs that much."""
QUESTION_TIMEOUT = 5.0
"""Seconds in which an engine must tell its version, or it counts as dead."""
CATCH_UP_INTERVAL = 1.0
"""Seconds between two looks for engines that have joined or restarted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    version: int
    seconds: float
    paused_seconds: float
    """How long the engines were paused."""
    logprob_gap: float | None
    """The largest difference between an engine's log-probabilities of the probe and the trainer's; None without a
    probe."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Engines that failed, by address, and why. They get no calls until they have the weights of a later sync."""


class WeightSync:
    """Brings weights to all engines of the list that `pool` holds, and sets their version there.

    `engines` are the addresses of further ones (not the gateway's); without a pool they are all.
    `probe` are token ids whose log-probabilities are compared after every sync; with `()` nothing is compared.
    `engine_key` is the engines' API key (vLLM's --api-key), `timeout` the seconds that one call to an engine may take,
    `engine_kind` the name of their kind. Calls block, and may come from any thread.
    """

    def __init__(
        self,
        engines: Sequence[str] = (),
        *,
        transfer: Transfer,
        pool: VersionedPool | None = None,
        probe: Sequence[int] = PROBE,
        tolerance: float = TOLERANCE,
        engine_key: str | None = None,
        timeout: float = 60.0,
        engine_kind: str = "vllm",
    ) -> None:
        if not engines and pool is None:
            raise BadRequest("a WeightSync needs the address of at least one engine, or the pool that lists them")
        if len(probe) == 1:
            raise BadRequest("a probe has two token ids or more: the first has no log-probability")
        kinds = {kind.name: kind for kind in ENGINES}
        if engine_kind not in kinds:
            raise BadRequest(f"no engine kind is called {engine_kind!r}; there are: {', '.join(kinds)}")
        self._control = partial(kinds[engine_kind].control, key=engine_key)
        self._timeout = timeout
        self._given = [self._control(url, timeout=timeout).url for url in engines]
        self._transfer = transfer
        self._pool = pool
        self._probe = list(probe)
        self._tolerance = tolerance
        self._one_at_a_time = threading.Lock()
        self._synced: SyncedWeights | None = None
        """None while a sync runs, and after one that failed: then no engine can be brought up to date."""
        self._failed: frozenset[str] = frozenset()
        """Engines that failed in the last sync, whatever version they tell."""
        self._catching_up: threading.Thread | None = None

    def sync(self, weights: "torch.nn.Module | Weights", version: int) -> SyncReport:
        """Returns once the engines compute with these weights under this version.

        An engine that fails is left out, and named in the report; SyncFailed if none is left. Without a probe,
        `weights` may be tensors by name instead of a model.
        """
        if self._probe and not _is_model(weights):
            raise BadRequest("log-probabilities are compared with the model's: sync the model, or pass probe=()")
        with self._one_at_a_time, self._transfer.exclusive():
            began, self._synced = time.monotonic(), None
            engines = SyncRound(self._engines())
            engines.each(self._version)  # a dead engine is noticed before the others are paused
            engines.require_one()
            self._transfer.prepare(_named(weights), engines.engines)
            expected = probe_logprobs(weights, self._probe) if _is_model(weights) and self._probe else None
            synced = SyncedWeights(version, expected)
            paused_seconds, gap = self._change(engines, synced)
            engines.require_one()
            if self._pool is not None:
                self._pool.set_policy_version(version)
            self._synced, self._failed = synced, frozenset(engines.failed)
            seconds = time.monotonic() - began
        if self._pool is not None and not self._transfer.is_collective and self._catching_up is None:
            self._catching_up = keep_calling(self.catch_up, CATCH_UP_INTERVAL)
        left_out = {url: str(failure) for url, failure in engines.failed.items()}
        return SyncReport(
            version=version, seconds=seconds, paused_seconds=paused_seconds, logprob_gap=gap, left_out=left_out
        )

    def catch_up(self) -> list[str]:
        """Brings engines that have joined, restarted or failed since the last sync to its weights.

        Returns their addresses. A thread calls it at intervals, so that an engine need not wait for the next sync.
        """
        synced = self._synced
        if synced is None or self._transfer.is_collective:
            return []
        behind = SyncRound([engine for engine in self._engines() if self._is_behind(engine, synced.version)])
        if not behind.engines:
            return []
        with self._one_at_a_time:
            if self._synced is not synced:
                return []  # there was a sync meanwhile
            with self._transfer.exclusive():
                self._change(behind, synced)
            caught_up = {engine.url for engine in behind.engines}
            self._failed = self._failed - caught_up | frozenset(behind.failed)
        for url in caught_up:
            log.info("engine %s was brought to version %d", url, synced.version)
        return sorted(caught_up)

    def close(self) -> None:
        """No engine is brought up to date any more."""
        self._synced = None

    def _engines(self) -> list[EngineControl]:
        listed = self._pool.engines() if self._pool is not None else ()
        return [self._control(url, timeout=self._timeout) for url in dict.fromkeys((*listed, *self._given))]

    def _version(self, engine: EngineControl) -> str:
        """In little time: a machine that is gone does not even refuse."""
        return self._control(engine.url, timeout=min(self._timeout, QUESTION_TIMEOUT)).version()

    def _is_behind(self, engine: EngineControl, version: int) -> bool:
        try:
            return self._version(engine) != str(version) or engine.url in self._failed
        except SyncFailed:
            return False  # it is down

    def _change(self, engines: SyncRound, synced: "SyncedWeights") -> tuple[float, float | None]:
        """Returns for how long the engines were paused, and the largest difference of log-probabilities."""
        began = time.monotonic()
        engines.pause()
        if self._transfer.is_collective:
            self._update_together(engines)
        else:
            engines.each(lambda engine: self._transfer.update([engine]), undo=break_off)
        engines.resume(synced.version)
        paused_seconds, gaps = time.monotonic() - began, list[float]()
        engines.prove(lambda engine: gaps.append(self._check(engine, synced)))
        return paused_seconds, None if synced.logprobs is None else max(gaps, default=None)

    def _update_together(self, engines: SyncRound) -> None:
        failure: SyncFailed | None = None
        try:
            if engines.engines:
                self._transfer.update(engines.engines)
        except SyncFailed as failed:
            failure = failed

        def outcome(_: EngineControl) -> None:
            if failure is not None:
                raise failure

        engines.each(outcome, undo=break_off)

    def _check(self, engine: EngineControl, synced: "SyncedWeights") -> float:
        """The largest difference of log-probabilities. SyncFailed if the engine has other weights."""
        if (told := engine.version()) != str(synced.version):
            raise SyncFailed(f"{engine.url} was given version {synced.version} and says it has {told}")
        if synced.logprobs is None:
            return 0.0
        gap = float(np.abs(np.subtract(engine.logprobs(self._probe), synced.logprobs)).max())
        if not gap <= self._tolerance:
            raise SyncFailed(
                f"{engine.url} does not compute with the weights of version {synced.version}: its log-probabilities "
                f"are up to {gap:.3g} off the trainer's, and {self._tolerance:g} is allowed. On a CPU, vLLM keeps "
                f"packed copies of its first weights unless a worker extension prevents it; an engine in a "
                f"lower precision than the trainer needs WeightSync(tolerance=…); else it got other weights"
            )
        return gap


@dataclass(frozen=True, slots=True)
class SyncedWeights:
    """What an engine must tell of the weights of a sync."""

    version: int
    logprobs: list[float] | None
    """Of the probe; None without one."""


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


def keep_calling(method: Callable[[], object], interval: float) -> threading.Thread:
    """Calls a method again and again in a thread, which ends when nothing else has the method's object any more."""
    weak = weakref.WeakMethod(method)

    def run() -> None:
        last = ""
        while True:
            time.sleep(interval)
            call = weak()
            if call is None:
                return
            try:
                call()
                last = ""
            except StepwellError as failure:
                if str(failure) != last:
                    log.warning("engines that have joined could not be brought up to date: %s", failure)
                last = str(failure)
            del call

    thread = threading.Thread(target=run, name="stepwell-weights", daemon=True)
    thread.start()
    return thread
