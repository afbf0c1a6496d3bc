"""prime-rl's trainer with batches from the pool: micro batches as the files of its filesystem transport.

    writer = PrimeRlWriter(pool, Path("outputs"), ranks=2, sequence_length=8192, groups=64)
    writer.write_step()  # whenever prime-rl has trained one

prime-rl is not imported; the order of FIELDS is the contract (prime_rl.transports.rollouts.types.MicroBatch, as of
August 2026). It has not run with prime-rl.

- A step is `rollouts/step_N/rank_R.bin` for every data rank, with equally many micro batches; one that is missing is
  filled up with one that trains nothing.
- A batch is acknowledged when its files are on disk: prime-rl reads them again if it resumes. A writer that was killed
  before knows the batch by `stepwell.json` in the folder of the step, and does not write it again.
- Rows are chosen as in the reference trainer (trainers/rows.py). A row longer than `sequence_length` is left out.
- prime-rl divides the logits that predict a token by the temperature at the token before it, so temperatures stand one
  place further left.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stepwell.common.atomic_files import replacing_file
from stepwell.pool.client import DataPool
from stepwell.steps.running_statistics import NO_PAST
from stepwell.trainers.checkpoint import TrainedLedger
from stepwell.trainers.learnable import LearningMonitor
from stepwell.trainers.rows import TrainedRows, choose_rows
from stepwell.trainers.settings import RowSettings, choose_old_logprobs

log = logging.getLogger("stepwell.trainers")

FIELDS = (
    *("input_ids", "loss_mask", "advantages", "inference_logprobs", "position_ids", "sequence_lengths"),
    *("temperatures", "env_names", "seq_lens"),
)
"""Of a micro batch, in their order on the wire; those that follow have defaults and are not written."""
RECORD = "stepwell.json"
FALSE, TRUE, INT32, FLOAT64, STR8, ARRAY32 = 0xC2, 0xC3, 0xD2, 0xCB, 0xD9, 0xDD
"""The types of msgpack that are written."""
ENVIRONMENT = "stepwell"
"""The name under which prime-rl's log counts the tokens."""


@dataclass(frozen=True, slots=True)
class MicroBatchRows:
    """The rows of one micro batch."""

    rows: tuple[int, ...]
    is_trained: bool = True
    """False: it only fills up a rank."""


class PrimeRlWriter:
    def __init__(
        self,
        pool: DataPool,
        output: Path,
        *,
        ranks: int,
        sequence_length: int,
        groups: int,
        channel: str = "train",
        timeout: float = 600.0,
        lease: float = 600.0,
        rows: RowSettings | None = None,
        max_unlearnable: int | None = 20,
    ) -> None:
        self._pool = pool
        self._folder = output / "rollouts"
        self._ranks = ranks
        self._length = sequence_length
        self._groups = groups
        self._channel = channel
        self._timeout = timeout
        self._lease = lease
        self._rows = choose_old_logprobs(
            rows or RowSettings(), ("recorded",), "prime-rl's files cannot leave out a log-probability"
        )
        self._monitor = LearningMonitor(max_unlearnable)
        self._statistics = NO_PAST
        self.step = 0
        """The next one to be written."""
        self._ledger = TrainedLedger()
        self._continue()

    def write_step(self) -> int:
        """Fetches batches until one teaches something, and writes it. Returns the number of its micro batches."""
        while True:
            batch = self._pool.fetch_batch(
                self._groups,
                timeout=self._timeout,
                lease=self._lease,
                channel=self._channel,
                unit=self._rows.unit,
            )
            rows = choose_rows(batch, self._ledger, self._rows, self._statistics)
            packed = pack_rows(rows, self._length, self._ranks)
            self._ledger.add(batch.leases, rows.uids)
            self._statistics = rows.statistics
            if packed:
                self._write(rows, packed)
            self._ledger.acknowledge(self._pool)
            self._monitor.check(rows)
            if packed:
                return len(packed)

    def _write(self, rows: TrainedRows, packed: Sequence[MicroBatchRows]) -> None:
        folder = self._folder / f"step_{self.step}"
        folder.mkdir(parents=True, exist_ok=True)
        with replacing_file(folder / RECORD) as file:
            record = {"leases": self._ledger.leases, "trajectories": self._ledger.trained}
            file.write(json.dumps(record).encode())
        for rank in range(self._ranks):
            of_rank = [encode_micro_batch(rows, part) for part in packed[rank :: self._ranks]]
            with replacing_file(folder / f"rank_{rank}.bin") as file:
                file.write(_array(of_rank))
        self.step += 1

    def _continue(self) -> None:
        """After the last step of which all files are there."""
        while all((self._folder / f"step_{self.step}" / f"rank_{rank}.bin").exists() for rank in range(self._ranks)):
            self.step += 1
        record = self._folder / f"step_{self.step - 1}" / RECORD
        if record.exists():
            saved = json.loads(record.read_bytes())
            self._ledger = TrainedLedger([(shard, lease) for shard, lease in saved["leases"]], saved["trajectories"])
            self._ledger.acknowledge(self._pool)


def pack_rows(rows: TrainedRows, length: int, ranks: int) -> list[MicroBatchRows]:
    """Micro batches of at most `length` tokens, the longest row first, as many as are a multiple of `ranks`."""
    lengths_R = np.diff(rows.merged.offsets_R)
    fitting = [row for row in rows.chosen_R[::-1].tolist() if lengths_R[row] <= length]
    if len(fitting) < len(rows.chosen_R):
        log.warning("%d rows are longer than %d tokens and left out", len(rows.chosen_R) - len(fitting), length)
    bins: list[list[int]] = []
    rooms: list[int] = []
    for row in fitting:
        place = next((number for number, room in enumerate(rooms) if room >= lengths_R[row]), len(bins))
        if place == len(bins):
            bins.append([])
            rooms.append(length)
        bins[place].append(row)
        rooms[place] -= int(lengths_R[row])
    packed = [MicroBatchRows(tuple(part)) for part in bins]
    return packed + [MicroBatchRows(packed[0].rows, is_trained=False)] * (-len(packed) % ranks) if packed else []


def encode_micro_batch(rows: TrainedRows, part: MicroBatchRows) -> bytes:
    """As msgpack: an array of the fields, in their order."""
    merged = rows.merged
    spans = [slice(merged.offsets_R[row], merged.offsets_R[row + 1]) for row in part.rows]
    lengths = np.array([span.stop - span.start for span in spans])
    tokens = np.concatenate([np.arange(span.start, span.stop) for span in spans])
    trained = rows.trained[tokens] & part.is_trained
    temperatures = np.concatenate([np.append(rows.temperatures[span][1:], 1.0) for span in spans])
    fields = {
        "input_ids": _integers(merged.tokens[tokens]),
        "loss_mask": _header(len(trained)) + np.where(trained, TRUE, FALSE).astype(np.uint8).tobytes(),
        "advantages": _floats(np.where(trained, rows.advantages[tokens], 0.0)),
        "inference_logprobs": _floats(merged.logprobs[tokens]),
        "position_ids": _integers(np.concatenate([np.arange(length) for length in lengths])),
        "sequence_lengths": _integers(lengths),
        "temperatures": _floats(temperatures),
        "env_names": _array([_text(ENVIRONMENT)] * len(tokens)),
        "seq_lens": _integers(lengths),
    }
    return _array([fields[name] for name in FIELDS])


def _header(length: int) -> bytes:
    return bytes([ARRAY32]) + length.to_bytes(4, "big")


def _array(items: Sequence[bytes]) -> bytes:
    return _header(len(items)) + b"".join(items)


def _integers(values: NDArray[np.integer]) -> bytes:
    return _numbers(values, INT32, ">i4")


def _floats(values: NDArray[np.floating]) -> bytes:
    return _numbers(values, FLOAT64, ">f8")


def _numbers(values: NDArray[np.number], kind: int, dtype: str) -> bytes:
    encoded = np.empty(len(values), [("kind", "u1"), ("value", dtype)])
    encoded["kind"], encoded["value"] = kind, values
    return _header(len(values)) + encoded.tobytes()


def _text(value: str) -> bytes:
    return bytes([STR8, len(value.encode())]) + value.encode()
