"""New weights for engines that keep serving: pause, load, set the version, resume, and then check the result.

Invariants:
- Calls in progress are held. They are broken off only at an engine whose weights are then unknown.
- There is one sync at a time.
- An engine has the new version only if its checksums show the new weights, where it tells them, and if it computes with
  them. The pool gets the version if at least one engine has it.
- The engines are those of the pool's list at that moment. One that joins, restarts or fails gets the weights of the
  last sync in the background, before gateways use it. So does one that a killed trainer has left paused.
"""

import logging
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from stepwell.engines import ENGINES
from stepwell.engines.engine import EngineControl
from stepwell.errors import BadRequest, EngineSilent, SyncFailed
from stepwell.trainers.policy_loss import token_logprobs
from stepwell.trainers.sync_round import DTYPES, EngineProof, SentDigests, SyncRound, break_off
from stepwell.trainers.transfers import (
    CheckpointTransfer,
    TensorState,
    Weights,
    WeightStream,
    is_follower,
    is_model,
    stream_weights,
)

if TYPE_CHECKING:
    import torch

log = logging.getLogger("stepwell.trainers")

PROBE = tuple(range(16))
"""Every vocabulary has these ids."""
TOLERANCES = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.3}
"""Tolerances, by the engine's dtype. In float32 about 1e-5 was measured, in bfloat16 up to 0.19."""
NEARER = 4.0
"""An engine whose log-probabilities are so many times nearer to the last weights than to the new ones has missed the
update. Rounding alone does not look like that on all tokens of the probe."""
QUESTION_TIMEOUT = 15.0
"""Seconds in which an engine must tell its version, or at least take a connection: else it counts as dead."""
CATCH_UP_INTERVAL = 1.0
"""Seconds between two looks for engines that have joined or restarted."""
LONGEST_INTERVAL = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    version: int
    seconds: float
    paused_seconds: float
    """How long the engines were paused."""
    proven_tensors: int | None = None
    """How many tensors of each engine have the checksum of what was sent; None if an engine does not tell them."""
    logprob_gap: float | None = None
    """The largest difference between an engine's log-probabilities of the probe and the trainer's; None without a
    probe."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Engines that failed, by address, and why. They get no calls until they have the weights of a later sync."""
    restore: TensorState | None = None
    """Weights from which the trainer must start again: always None, as only a guard asks for it."""


class WeightSync:
    """Brings weights to all engines of the list that `pool` holds, and sets their version there.

    `engines` are the addresses of further ones (not the gateway's); without a pool they are all.
    `checksums` compares every tensor of the engines with what was sent, where they tell checksums. Each side hashes its
    weights on one core: a gigabyte takes from half a second to some seconds. `probe` are token ids whose
    log-probabilities are compared after every sync; with `()` nothing is compared. `tolerance` is how far they may
    differ; without it, the engine's dtype decides. `engine_key` is the engines' API key (vLLM's --api-key), `timeout`
    the seconds that one call to an engine may take, `engine_kind` the name of their kind. Without `background`, engines
    that join or restart wait for a call of `catch_up`. Calls block, and may come from any thread.
    """

    def __init__(
        self,
        engines: Sequence[str] = (),
        *,
        transfer: CheckpointTransfer,
        pool: VersionedPool | None = None,
        probe: Sequence[int] = PROBE,
        tolerance: float | None = None,
        checksums: bool = True,
        engine_key: str | None = None,
        timeout: float = 60.0,
        engine_kind: str = "vllm",
        background: bool = True,
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
        self._compares_checksums = checksums
        self._proofs: dict[str, EngineProof] = {}
        """The proof of each engine's weights, by its address."""
        self._one_at_a_time = threading.Lock()
        self._looking = threading.Lock()
        """Held while engines are looked for that are behind."""
        self._synced: SyncedWeights | None = None
        """None while a sync runs, and after one that failed: then no engine can be brought up to date."""
        self._failed: frozenset[str] = frozenset()
        """Engines that failed in the last sync, whatever version they tell."""
        self._running: set[str] = set()
        """Engines that this process has resumed or seen running. Another one may have been left paused by a trainer
        that was killed, with the right version."""
        self._ours: Sequence[float] | None = None
        """The log-probabilities of the probe under the weights of the last sync."""
        self._background = background
        self._catching_up: threading.Thread | None = None
        self._is_closed = False

    def sync(self, weights: Weights, version: int, *, logprobs: Sequence[float] | None = None) -> SyncReport:
        """Returns once the engines compute with these weights under this version.

        An engine that fails is left out, and named in the report; SyncFailed if none is left. `weights` may be tensors
        by name instead of a model without a probe, or with `logprobs`, those of the probe under these weights. Of a
        sharded model, every rank calls this at the same time; rank 0 talks to the engines.
        """
        if self._probe and logprobs is None and not is_model(weights):
            raise BadRequest(
                "log-probabilities are compared with the model's: sync the model, pass its logprobs, or probe=()"
            )
        began = time.monotonic()
        if is_follower(weights):
            return self._help_to_gather(weights, version, began)
        if self._background and self._pool is not None and self._catching_up is None:
            self._catching_up = keep_calling(self.catch_up, CATCH_UP_INTERVAL)
        with self._one_at_a_time, self._transfer.exclusive():
            self._announce()
            self._synced = None
            engines = SyncRound(self._engines())
            engines.each(self._wait_for_answer)  # a dead engine is noticed before the others are paused
            engines.require_one()
            ours = self._our_logprobs(weights) if logprobs is None else logprobs
            synced = SyncedWeights(version, ours, self._ours, self._new_digests(engines.engines))
            self._transfer.prepare(synced.watch(stream_weights(weights)), engines.engines)
            change = self._change(engines, synced)
            engines.require_one()
            self._ours = synced.logprobs
            if self._pool is not None:
                self._pool.set_policy_version(version, check=False)  # each engine has told that it has it
            self._synced, self._failed = synced, frozenset(engines.failed)
            seconds = time.monotonic() - began
        left_out = {url: str(failure) for url, failure in engines.failed.items()}
        return SyncReport(version=version, seconds=seconds, left_out=left_out, **change._asdict())

    def catch_up(self) -> list[str]:
        """Brings engines that have joined, restarted or failed since the last sync to its weights.

        Returns their addresses; SyncFailed if one of them fails. A thread calls it at intervals, so that an engine need
        not wait for the next sync.
        """
        with self._looking:
            return self._catch_up()

    def _catch_up(self) -> list[str]:
        self._announce()
        synced = self._synced
        if synced is None:
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
        if behind.failed:
            raise SyncFailed("; ".join(map(str, behind.failed.values())))
        return sorted(caught_up)

    def stage(self, weights: "torch.nn.Module", version: int) -> None:
        """Makes these the weights that `catch_up` brings to the engines; none is changed now."""
        with self._one_at_a_time, self._transfer.exclusive():
            self._announce()
            self._synced = None
            digests = self._new_digests(self._engines()) or (SentDigests() if self._compares_checksums else None)
            synced = SyncedWeights(version, self._our_logprobs(weights), self._ours, digests)
            self._transfer.prepare(synced.watch(stream_weights(weights)), ())
            self._ours, self._synced, self._failed = synced.logprobs, synced, frozenset()

    def versions(self) -> dict[str, str | None]:
        """The version that each engine reports; None if it does not answer."""
        engines = self._engines()
        with ThreadPoolExecutor(max(1, len(engines))) as threads:
            told = list(threads.map(self._version_or_none, engines))
        return {engine.url: version for engine, version in zip(engines, told, strict=True)}

    def close(self) -> None:
        """No engine is brought up to date any more, and the pool is not asked again."""
        self._synced, self._is_closed = None, True
        with self._looking:
            pass  # what had begun has ended

    def _announce(self) -> None:
        """Announces the version, so that gateways hold calls until the engines have weights."""
        if self._pool is not None and not self._is_closed:
            self._pool.announce_sync()

    def _engines(self) -> list[EngineControl]:
        listed = self._pool.engines() if self._pool is not None else ()
        return [self._control(url, timeout=self._timeout) for url in dict.fromkeys((*listed, *self._given))]

    def _version(self, engine: EngineControl) -> str:
        """The version that the engine reports in little time: a machine that is gone does not even refuse."""
        return self._control(engine.url, timeout=min(self._timeout, QUESTION_TIMEOUT)).version()

    def _wait_for_answer(self, engine: EngineControl) -> str:
        """An engine that takes connections is slow, not dead: it has the whole timeout."""
        deadline = time.monotonic() + self._timeout
        while True:
            asked = time.monotonic()
            try:
                return self._version(engine)
            except EngineSilent:
                now = time.monotonic()
                is_slow = now - asked >= min(self._timeout, QUESTION_TIMEOUT) and takes_connections(engine.url)
                if not is_slow or now >= deadline:
                    raise
                left = deadline - now
                log.warning("engine %s is slow to answer; new weights wait %.0f s more for it", engine.url, left)

    def _version_or_none(self, engine: EngineControl) -> str | None:
        try:
            return self._version(engine)
        except SyncFailed:
            return None  # it is down

    def _is_behind(self, engine: EngineControl, version: int) -> bool:
        told = self._version_or_none(engine)
        if told is None:
            return False
        return told != str(version) or engine.url in self._failed or self._was_left_paused(engine)

    def _was_left_paused(self, engine: EngineControl) -> bool:
        if engine.url in self._running:
            return False
        try:
            is_paused = self._control(engine.url, timeout=min(self._timeout, QUESTION_TIMEOUT)).is_paused()
        except SyncFailed:
            return False  # the next look asks again
        if not is_paused:
            self._running.add(engine.url)
        return is_paused

    def _our_logprobs(self, weights: Weights) -> list[float] | None:
        return probe_logprobs(weights, self._probe) if self._probe and is_model(weights) else None

    def _help_to_gather(self, weights: Weights, version: int, began: float) -> SyncReport:
        """Does what rank 0 does with the model, in the same order, and nothing else."""
        self._our_logprobs(weights)
        for _ in stream_weights(weights):
            pass
        return SyncReport(version=version, seconds=time.monotonic() - began, paused_seconds=0.0)

    def _new_digests(self, engines: Sequence[EngineControl]) -> SentDigests | None:
        """Digests in the dtypes of the engines that tell checksums; in all, if one of them is not known."""
        proofs = [proof for engine in engines if (proof := self._proof(engine)).has_checksums]
        if not (self._compares_checksums and proofs):
            return None
        known = {proof.dtype for proof in proofs if proof.dtype is not None}
        return SentDigests(sorted(known) if all(proof.dtype for proof in proofs) else DTYPES)

    def _proof(self, engine: EngineControl) -> EngineProof:
        return self._proofs.setdefault(engine.url, EngineProof(engine.url))

    def _change(self, engines: SyncRound, synced: "SyncedWeights") -> "WeightChange":
        began = time.monotonic()
        engines.pause()
        engines.each(lambda engine: self._transfer.update([engine]), undo=break_off)
        proven: list[int | None] = []
        engines.each(lambda engine: proven.append(self._check_weights(engine, synced)), undo=break_off)
        engines.resume(synced.version)
        self._running.update(engine.url for engine in engines.engines)
        paused_seconds, gaps = time.monotonic() - began, list[float]()
        engines.prove(lambda engine: gaps.append(self._check(engine, synced)))
        return WeightChange(
            paused_seconds,
            min((count for count in proven if count is not None), default=None) if None not in proven else None,
            None if synced.logprobs is None else max(gaps, default=None),
        )

    def _check_weights(self, engine: EngineControl, synced: "SyncedWeights") -> int | None:
        """How many tensors are proven; None if the engine cannot tell. SyncFailed if it has other weights."""
        proof = self._proof(engine)
        checksums = engine.checksums() if synced.digests is not None and proof.has_checksums else None
        proof.has_checksums = synced.digests is None or checksums is not None
        if synced.digests is None or checksums is None:
            return None
        return proof.check(synced.digests, checksums)

    def _check(self, engine: EngineControl, synced: "SyncedWeights") -> float:
        """The largest difference of log-probabilities. SyncFailed if the engine has other weights."""
        if (told := engine.version()) != str(synced.version):
            raise SyncFailed(f"{engine.url} was given version {synced.version} and says it has {told}")
        if synced.logprobs is None:
            return 0.0
        theirs = engine.logprobs(self._probe)
        gap = _gap(theirs, synced.logprobs)
        tolerance = self._tolerance or TOLERANCES[self._proof(engine).dtype or "float32"]
        if not gap <= tolerance:
            raise SyncFailed(
                f"{engine.url} does not compute with the weights of version {synced.version}: its log-probabilities "
                f"are up to {gap:.3g} off the trainer's, and {tolerance:g} is allowed. On a CPU, vLLM keeps "
                f"packed copies of its first weights unless a worker extension prevents it; an engine in a "
                f"lower precision than the trainer needs WeightSync(tolerance=…); else it got other weights"
            )
        if synced.before is not None and NEARER * (old_gap := _gap(theirs, synced.before)) < gap:
            raise SyncFailed(
                f"{engine.url} still computes with the weights before version {synced.version}: its log-probabilities "
                f"are {old_gap:.3g} off those of the last sync, and {gap:.3g} off those of the new weights"
            )
        return gap


@dataclass(frozen=True, slots=True)
class SyncedWeights:
    """The facts that an engine must report of the weights of a sync."""

    version: int
    logprobs: Sequence[float] | None
    """The log-probabilities of the probe; None without one."""
    before: Sequence[float] | None
    """The same under the weights of the sync before."""
    digests: SentDigests | None

    def watch(self, weights: WeightStream) -> WeightStream:
        return weights if self.digests is None else self.digests.watch(weights)


class WeightChange(NamedTuple):
    """The figures of a sync that are reported of the engines."""

    paused_seconds: float
    proven_tensors: int | None
    logprob_gap: float | None


def takes_connections(url: str) -> bool:
    """Whether a process listens there."""
    address = urlsplit(url)
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        socket.create_connection((address.hostname or "", port), timeout=QUESTION_TIMEOUT).close()
    except OSError:
        return False
    return True


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


def _gap(theirs: Sequence[float], ours: Sequence[float]) -> float:
    return float(np.abs(np.subtract(theirs, ours)).max())


def keep_calling(
    method: Callable[[], object],
    interval: float,
    *,
    longest: float = LONGEST_INTERVAL,
    task: str = "engines could not be brought up to date",
) -> threading.Thread:
    """Calls a method again and again in a thread, which ends when nothing else has the method's object any more.

    After failures the interval is longer, up to `longest`; `task` says in the log what failed.
    """
    weak = weakref.WeakMethod(method)

    def run() -> None:
        pause = interval
        while True:
            time.sleep(pause)
            call = weak()
            if call is None:
                return
            try:
                call()
                pause = interval
            except Exception as failure:  # noqa: BLE001 - whatever it is, the next try may succeed
                pause = min(2 * pause, longest)
                log.warning("%s; next try in %g s: %s", task, pause, failure)
            del call

    thread = threading.Thread(target=run, name="stepwell-weights", daemon=True)
    thread.start()
    return thread
