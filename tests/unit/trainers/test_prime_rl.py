"""The files that prime-rl reads, in the shape that it publishes (prime_rl/transports/rollouts, commit 559b447): paths,
and the fields of MicroBatch in their order. prime-rl itself was not run."""

import json
from pathlib import Path
from typing import Any

import msgpack
import pytest

from stepwell.trainers.prime_rl import FIELDS, PrimeRlWriter
from tests.unit.trainers.models import one_turn
from tests.unit.trainers.training_pool import TrainingPool

PUBLISHED = [
    *("input_ids", "loss_mask", "advantages", "inference_logprobs", "position_ids", "sequence_lengths"),
    *("temperatures", "env_names", "seq_lens"),
]
"""The fields without a default, in the order of the class: an array-like msgspec struct has no names on the wire."""
PER_TOKEN = {
    "input_ids": int,
    "loss_mask": bool,
    "advantages": float,
    "inference_logprobs": float,
    "position_ids": int,
    "temperatures": float,
    "env_names": str,
}


def filled(groups: int = 2) -> TrainingPool:
    """Each with a rollout of two turns in one row, at temperature 0.5, and a short one."""
    pool = TrainingPool()
    for number in range(groups):
        prompt = f"p{number}"
        turns = [
            one_turn(f"{prompt}-a", prompt, [1], [2], temperature=0.5),
            one_turn(f"{prompt}-a", prompt, [1, 2, 9], [5, 6], temperature=0.5),
        ]
        pool.add_group(prompt, [(turns, 1.0), ([one_turn(f"{prompt}-b", prompt, [1, 7], [3])], 0.0)])
    return pool


def writer_of(pool: TrainingPool, output: Path, **settings: Any) -> PrimeRlWriter:
    return PrimeRlWriter(pool, output, **{"ranks": 1, "sequence_length": 64, "groups": 2} | settings)


def micro_batches(output: Path, step: int, rank: int) -> list[dict[str, Any]]:
    """As prime-rl's receiver decodes them."""
    decoded = msgpack.unpackb((output / "rollouts" / f"step_{step}" / f"rank_{rank}.bin").read_bytes())
    return [dict(zip(PUBLISHED, values, strict=True)) for values in decoded]


def test_the_fields_are_those_that_prime_rl_publishes() -> None:
    assert list(FIELDS) == PUBLISHED


def test_a_micro_batch_has_its_rows_end_to_end(tmp_path: Path) -> None:
    assert writer_of(filled(1), tmp_path, groups=1).write_step() == 1
    (batch,) = micro_batches(tmp_path, 0, 0)
    assert batch["input_ids"] == [1, 2, 9, 5, 6, 1, 7, 3]
    assert batch["loss_mask"] == [False, True, False, True, True, False, False, True]
    assert batch["position_ids"] == [0, 1, 2, 3, 4, 0, 1, 2]
    assert batch["sequence_lengths"] == batch["seq_lens"] == [5, 3]
    assert batch["inference_logprobs"] == [0.0, -2.0, 0.0, -2.0, -2.0, 0.0, 0.0, -2.0]
    good = pytest.approx(0.5**0.5, abs=1e-3)
    assert [batch["advantages"][place] for place in (1, 3, 4)] == [good] * 3
    assert batch["advantages"][7] == pytest.approx(-(0.5**0.5), abs=1e-3)


def test_every_array_has_one_entry_per_token_and_its_type(tmp_path: Path) -> None:
    writer_of(filled(), tmp_path).write_step()
    (batch,) = micro_batches(tmp_path, 0, 0)
    for name, kind in PER_TOKEN.items():
        assert len(batch[name]) == sum(batch["seq_lens"]), name
        assert {type(value) for value in batch[name]} == {kind}, name


def test_a_temperature_stands_where_the_token_is_predicted(tmp_path: Path) -> None:
    writer_of(filled(1), tmp_path, groups=1).write_step()
    (batch,) = micro_batches(tmp_path, 0, 0)
    assert batch["temperatures"] == [0.5, 1.0, 0.5, 0.5, 1.0, 1.0, 1.0, 1.0]


def test_all_ranks_have_equally_many_micro_batches_and_nothing_is_trained_twice(tmp_path: Path) -> None:
    assert writer_of(filled(), tmp_path, ranks=3, sequence_length=5).write_step() == 6
    of_ranks = [micro_batches(tmp_path, 0, rank) for rank in range(3)]
    assert [len(batches) for batches in of_ranks] == [2, 2, 2]
    assert all(sum(batch["seq_lens"]) <= 5 for batches in of_ranks for batch in batches)
    assert sum(sum(batch["loss_mask"]) for batches in of_ranks for batch in batches) == 2 * 4


def test_a_row_that_is_too_long_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer_of(filled(1), tmp_path, groups=1, sequence_length=4).write_step()
    (batch,) = micro_batches(tmp_path, 0, 0)
    assert batch["input_ids"] == [1, 7, 3]
    assert "1 rows are longer than 4 tokens" in caplog.text


def test_a_batch_is_acknowledged_once_its_files_are_there(tmp_path: Path) -> None:
    pool = filled(4)
    writer = writer_of(pool, tmp_path)
    writer.write_step()
    assert pool.acknowledged == ["lease-1"]
    writer.write_step()
    assert (pool.acknowledged, writer.step, pool.held) == (["lease-1", "lease-2"], 2, 0)
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == ["step_0", "step_1"]


def test_a_writer_that_was_killed_before_its_acknowledgement_writes_nothing_twice(tmp_path: Path) -> None:
    pool = filled(4)
    pool.dies_at_ack = True
    with pytest.raises(KeyboardInterrupt):
        writer_of(pool, tmp_path).write_step()
    pool.dies_at_ack = False
    pool.advance_to(1000.0)
    again = writer_of(pool, tmp_path)
    assert again.step == 1
    again.write_step()
    record = json.loads((tmp_path / "rollouts" / "step_1" / "stepwell.json").read_text())
    assert record["trajectories"] == [f"p{n}-{r}" for n in range(4) for r in "ab"]
    (first,), (second,) = micro_batches(tmp_path, 0, 0), micro_batches(tmp_path, 1, 0)
    assert sum(first["loss_mask"]) == sum(second["loss_mask"]) == 8
    assert pool.held == 0
