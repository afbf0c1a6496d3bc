import numpy as np
import pytest

from stepwell.errors import BadRequest
from stepwell.trainers.rows import choose_rows
from stepwell.trainers.settings import RowSettings
from stepwell.trainers.tinker.datums import DatumRow, datum_rows, logprob_gap
from stepwell.trainers.tinker.tinker_settings import TinkerSettings
from tests.unit.trainers.models import one_turn
from tests.unit.trainers.training_pool import TrainingPool


def rows_of(pool: TrainingPool, groups: int = 1, **settings: object) -> list[DatumRow]:
    batch = pool.fetch_batch(groups, lease=60.0)
    return datum_rows(choose_rows(batch, (), RowSettings(temperature=1.0)), **settings)  # type: ignore[arg-type]


def two_turns(uid: str, prompt: str, answer: int, **fields: object) -> list[object]:
    first = one_turn(uid, prompt, [1, 2], [answer, 7], **fields)
    return [first, one_turn(uid, prompt, [1, 2, answer, 7, 9], [5, 6], **fields)]


@pytest.fixture
def pool() -> TrainingPool:
    pool = TrainingPool()
    pool.add_group("p", [(two_turns("a", "p", 3), 1.0), (two_turns("b", "p", 4), 0.0)])  # type: ignore[list-item]
    return pool


def test_a_target_follows_its_input_and_only_what_was_sampled_counts(pool: TrainingPool) -> None:
    row, other = rows_of(pool)
    assert row.inputs.tolist() == [1, 2, 3, 7, 9, 5]
    assert row.targets.tolist() == [2, 3, 7, 9, 5, 6]
    assert row.logprobs.tolist() == [0.0, -2.0, -2.0, 0.0, -2.0, -2.0]
    assert (row.advantages != 0).tolist() == [False, True, True, False, True, True]
    assert row.advantages.sum() == pytest.approx(-other.advantages.sum())
    assert {len(part) for part in (row.inputs, row.targets, row.logprobs, row.advantages, row.versions)} == {6}


def test_the_weights_of_token_mean_are_in_the_advantages(pool: TrainingPool) -> None:
    rows = rows_of(pool)
    whole = np.abs(np.concatenate([row.advantages for row in rows]))
    assert whole.sum() == pytest.approx(0.7069, abs=1e-3), "eight tokens of ±0.707, an eighth each"


def test_a_service_that_averages_computes_the_same_loss_as_one_that_sums() -> None:
    pool = TrainingPool()
    short, long = one_turn("a", "p", [1], [2]), one_turn("b", "p", [1, 1, 1, 1], [3, 4])
    pool.add_group("p", [([short], 1.0), ([long], 0.0)])
    rows = choose_rows(pool.fetch_batch(1, lease=60.0), (), RowSettings(temperature=1.0))
    summed, averaged = datum_rows(rows, multiple=4), datum_rows(rows, multiple=4, service_loss="mean")
    assert [len(row.targets) for row in summed] == [1, 5, 5, 5]
    for row, other in zip(summed, averaged, strict=True):
        mean_over_row = other.advantages / len(other.targets)
        assert (mean_over_row / len(averaged)).tolist() == pytest.approx(row.advantages.tolist())


def test_a_row_ends_with_its_last_trained_token() -> None:
    pool = TrainingPool()
    rollouts = [
        ([one_turn(uid, "p", [1], [answer, 8, 8], response_mask=np.array([True, False, False]))], float(answer))
        for uid, answer in (("a", 3), ("b", 4))
    ]
    pool.add_group("p", rollouts)
    assert [row.targets.tolist() for row in rows_of(pool)] == [[3], [4]]


def test_rows_that_fill_up_teach_nothing(pool: TrainingPool) -> None:
    rows = rows_of(pool, multiple=4)
    assert [bool(np.any(row.advantages)) for row in rows] == [True, True, False, False]
    assert [bool((row.versions >= 0).any()) for row in rows] == [True, True, False, False]


def test_nothing_to_train_is_no_row() -> None:
    pool = TrainingPool()
    pool.add_group("p", [([one_turn("a", "p", [1], [2])], 1.0), ([one_turn("b", "p", [1], [3])], 1.0)])
    assert rows_of(pool, multiple=8) == []


def test_the_gap_is_that_of_the_newest_versions_tokens() -> None:
    pool = TrainingPool()
    old, new = one_turn("a", "p", [1], [2], policy_version=1), one_turn("b", "p", [1], [3, 4], policy_version=2)
    pool.add_group("p", [([old], 1.0), ([new], 0.0)])
    rows = rows_of(pool)
    outputs = [row.logprobs + (0.25 if len(row.targets) == 2 else 9.0) for row in rows]
    assert logprob_gap(rows, outputs, 2) == pytest.approx(0.25)
    assert logprob_gap(rows, outputs, 3) is None


def test_another_temperature_is_refused() -> None:
    with pytest.raises(BadRequest, match="temperature 1"):
        TinkerSettings(temperature=0.7)
