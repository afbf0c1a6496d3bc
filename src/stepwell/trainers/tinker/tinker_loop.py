"""Trains an adapter of one channel by a service that speaks the Tinker API.

- A batch is acknowledged only when the service has saved a state that contains it, and a file here that names both.
- A killed run continues from that state with its optimizer. What was trained since is leased again: no batch is lost,
  and none is in the weights twice.
- After a call to the service that failed, nobody knows what the service did. The next step begins at the last saved
  state too.
- Of several channels, each has a trainer. They share the service, the engines and the pool, and nothing else.
"""

import logging
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any

from stepwell.errors import BadRequest, SyncFailed
from stepwell.pool.client import DataPool
from stepwell.trainers.feed import Feed, FeedState, read_state, write_state
from stepwell.trainers.reporting import Stopwatch
from stepwell.trainers.rows import FilledIn, TrainedRows
from stepwell.trainers.settings import choose_old_logprobs
from stepwell.trainers.tinker.adapter_sync import AdapterSync
from stepwell.trainers.tinker.datums import (
    StoredWeights,
    TrainingClient,
    TrainingService,
    datum_rows,
    imported_tinker,
    logprob_gap,
    to_datums,
    with_logprobs,
)
from stepwell.trainers.tinker.tinker_settings import TinkerSettings

log = logging.getLogger("stepwell.trainers")

FILE = "tinker.json"
MOST_BYTES = 2**34
"""Bytes that the archive of an adapter may have."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TinkerRecord(FeedState):
    """The knowledge of a run beside the weights, which the service keeps. It names a state that the service has saved;
    what is trained according to it is in that state, and nothing else is."""

    base_model: str
    channel: str
    state: str
    """The service's name of the saved weights and optimizer: tinker://…"""
    update: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TinkerUpdate:
    """One update in numbers."""

    channel: str
    update: int
    version: int
    """The version of the adapter that the engines have now."""
    reward: float
    """The mean return of the batch's scored rollouts; NaN if there is none."""
    rows: int
    tokens: int
    """The number of trained tokens."""
    logprob_gap: float | None
    """The gap between the engines and the service, before the update: see TinkerSettings.logprob_tolerance."""
    filled_in: FilledIn
    """The values that the data lacked and that were filled in."""
    seconds: dict[str, float] = field(default_factory=dict)
    """How long fetch, train, save and sync took."""


class TinkerTrainer:
    """`folder` has the record of the run; a trainer that finds one there continues it. Each of `reports` is called with
    the numbers of every update."""

    def __init__(
        self,
        pool: DataPool,
        service: TrainingService,
        sync: AdapterSync,
        folder: Path,
        *,
        base_model: str,
        settings: TinkerSettings | None = None,
        reports: Sequence[Callable[[TinkerUpdate], object]] = (),
    ) -> None:
        self.settings = choose_old_logprobs(
            settings or TinkerSettings(),
            ("current", "recorded"),
            "a Tinker service computes log-probabilities by the newest weights alone",
        )
        if sync.channel != self.settings.channel:
            raise BadRequest(f"channel {self.settings.channel!r} is trained, and {sync.channel!r} would be served")
        self.update = 0
        """Trained batches, including those before a resume."""
        self.version = 0
        """The version of the last adapter that the engines were given."""
        self._pool = pool
        self._feed = Feed(pool, self.settings)
        self._service = service
        self._stored = service.create_rest_client()
        self._sync = sync
        self._folder = folder
        self._base_model = base_model
        self._reports = reports
        self._client: TrainingClient | None = None
        """The client of this run; None before the start and after a failure."""
        self._state = ""
        self._is_ahead = False
        """The service's weights are newer than the engines'."""

    def run(self, updates: int | None = None) -> None:
        """Train until that many updates are done, including those before a resume."""
        self.start()
        while self.update < (self.settings.updates if updates is None else updates):
            self.step()
        if self._feed.has_open_leases and self._client is not None:
            self._save(self._client)

    def start(self) -> TrainingClient:
        """Continue from the record, if there is one, and bring its adapter to the engines. `step` calls it."""
        if self._client is not None:
            return self._client
        record = read_state(TinkerRecord, self._folder / FILE)
        if record is None:
            client = self._service.create_lora_training_client(self._base_model, rank=self.settings.rank)
        else:
            self._restore(record)
            client = self._service.create_training_client_from_state_with_optimizer(record.state)
        newest = max(self._pool.channel_policy(self.settings.channel).version, self._pool.stats().policy_version)
        if newest > self.version or record is None:
            self.version = newest + 1
        if record is None:
            self._save(client)
        else:
            self._feed.acknowledge()
        self._publish(client)
        self._client = client
        return client

    def step(self) -> TinkerUpdate:
        """Fetch a batch, train on it, save, and give the engines the new adapter."""
        client = self.start()
        stopwatch, before = Stopwatch(), self.version
        with stopwatch.timing("fetch"):
            rows = self._feed.take_new(self.settings.groups, lambda: self._save(client)).rows
        with self._start_again_on_failure():
            with stopwatch.timing("train"):
                gap = self._train(client, rows)
            self._record_update(is_changed=rows.tokens > 0)
            with stopwatch.timing("save"):
                if self.update % self.settings.checkpoint_every == 0:
                    self._save(client)
            with stopwatch.timing("sync"):
                if self.version != before:
                    self._publish(client)
        done = TinkerUpdate(
            channel=self.settings.channel,
            update=self.update,
            version=self.version,
            reward=rows.reward,
            rows=len(rows.chosen_R),
            tokens=rows.tokens,
            logprob_gap=gap,
            filled_in=rows.filled_in(before),
            seconds=stopwatch.seconds,
        )
        for report in self._reports:
            report(done)
        self._feed.monitor.check(rows, before)
        return done

    def _train(self, client: TrainingClient, rows: TrainedRows) -> float | None:
        settings = self.settings
        wanted = datum_rows(
            rows,
            settings.loss_aggregation,
            settings.fixed_length,
            multiple=settings.rows_multiple,
            service_loss=settings.service_loss,
        )
        if not wanted:
            return None
        thresholds = {"clip_low_threshold": 1.0 - settings.clip_low, "clip_high_threshold": 1.0 + settings.clip_high}
        config = None if settings.loss == "importance_sampling" else thresholds
        datums = to_datums(wanted)
        if rows.missing.any():
            known = client.forward(datums, settings.loss, config).result().loss_fn_outputs
            datums = to_datums(with_logprobs(wanted, [_numbers(output["logprobs"]) for output in known]))
        passed = client.forward_backward(datums, settings.loss, config).result()
        gap = logprob_gap(wanted, [_numbers(output["logprobs"]) for output in passed.loss_fn_outputs], self.version)
        if gap is not None and not gap <= settings.logprob_tolerance:
            raise SyncFailed(
                f"the engines do not compute with adapter version {self.version} of channel {settings.channel!r}: "
                f"their log-probabilities are {gap:.3g} off the service's on average, and "
                f"{settings.logprob_tolerance:g} is allowed. Is the engines' base model the service's, in the same "
                "precision?"
            )
        adam = imported_tinker().types.AdamParams(
            learning_rate=settings.learning_rate, grad_clip_norm=settings.max_gradient_norm
        )
        client.optim_step(adam).result()
        return gap

    def _record_update(self, *, is_changed: bool) -> None:
        self.update += 1
        self._feed.count_as_trained()
        self._is_ahead |= is_changed
        if self._is_ahead and self.update % self.settings.sync_every == 0:
            self.version += 1

    def _publish(self, client: TrainingClient) -> None:
        saved = client.save_weights_for_sampler(f"{self.settings.channel}-v{self.version}-{token_hex(4)}").result()
        self._sync.publish(download(self._stored, saved.path), self.version)
        delete(self._stored, saved.path)
        self._is_ahead = False

    @contextmanager
    def _start_again_on_failure(self) -> Iterator[None]:
        """Returns to the pool what is in no saved state. The record names what is in one."""
        try:
            yield
        except BaseException:
            self._client = None
            self._feed.give_back(also_trained=True)
            raise

    # -- states --------------------------------------------------------------------------------------------------------

    def _save(self, client: TrainingClient) -> None:
        """The service saves, then the record is written, then what it contains is acknowledged."""
        before = self._state
        state = client.save_state(f"{self.settings.channel}-u{self.update}-{token_hex(4)}").result().path
        record = TinkerRecord(
            base_model=self._base_model,
            channel=self.settings.channel,
            state=state,
            update=self.update,
            version=self.version,
            **asdict(self._feed.state()),
        )
        write_state(self._folder / FILE, record)
        self._state = state
        self._feed.acknowledge()
        if before:
            delete(self._stored, before)

    def _restore(self, record: TinkerRecord) -> None:
        if (record.channel, record.base_model) != (self.settings.channel, self._base_model):
            raise BadRequest(
                f"{self._folder} has a run of channel {record.channel!r} on {record.base_model}; name another folder"
            )
        self.update, self.version, self._state = record.update, record.version, record.state
        self._feed.restore(record)


def run_side_by_side(trainers: Sequence[TinkerTrainer], updates: int | None = None) -> None:
    """Runs trainers of different channels at once. One that fails does not stop the others; at the end, what failed is
    raised."""
    with ThreadPoolExecutor(max(1, len(trainers)), thread_name_prefix="stepwell-tinker") as threads:
        runs = [threads.submit(trainer.run, updates) for trainer in trainers]
    failures = [failure for run in runs if isinstance(failure := run.exception(), Exception)]
    if failures:
        raise ExceptionGroup("trainers of channels failed", failures)


def download(service: StoredWeights, path: str, *, timeout: float = 600.0) -> bytes:
    """The archive of weights that the service has saved for sampling, by the path that it told.

    That is tinker://RUN/KIND/NAME. SkyRL tells tinker://RUN/NAME for sampler weights, and its archive goes by the bare
    name.
    """
    run, name = _parts(path)
    url = service.get_checkpoint_archive_url(run, name).result().url
    if not str(url).startswith(("http://", "https://")):
        raise SyncFailed(f"the service stores {path} under an address that is not http: {url}")
    with urllib.request.urlopen(url, timeout=timeout) as reply:
        archive: bytes = reply.read(MOST_BYTES + 1)
    if len(archive) > MOST_BYTES:
        raise SyncFailed(f"the archive of {path} has more than {MOST_BYTES} bytes")
    return archive


def delete(service: StoredWeights, path: str) -> None:
    """Deletes what the service has saved under a path. If it cannot, it only keeps more than is needed."""
    run, name = _parts(path)
    try:
        # SkyRL wants the kind here, which its path does not have
        service.delete_checkpoint(run, name if "/" in name else f"sampler_weights/{name}").result()
    except Exception as failure:  # noqa: BLE001 - whatever a service answers
        log.info("the service keeps %s: %s", path, failure)


def _parts(path: str) -> tuple[str, str]:
    """The run, and how the service calls what is saved of it."""
    run, _, name = path.removeprefix("tinker://").partition("/")
    if not run or not name:
        raise SyncFailed(f"the service has saved weights under a path that is not tinker://RUN/NAME: {path}")
    return run, name


def _numbers(tensor: Any) -> Any:
    """The array in tinker's TensorData."""
    return tensor.to_numpy() if hasattr(tensor, "to_numpy") else tensor.data
