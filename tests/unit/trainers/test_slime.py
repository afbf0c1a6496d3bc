"""What slime is given, in the shape that it publishes (slime/utils/types.py and slime/ray/rollout.py, commit 624b824):
the names of Sample's fields, and what its conversion to training data demands. slime itself was not run."""

from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from stepwell.errors import BadRequest, NothingLearned
from stepwell.trainers.settings import RowSettings
from stepwell.trainers.slime import SlimeRollouts
from tests.unit.trainers.models import one_turn
from tests.unit.trainers.training_pool import TrainingPool


@dataclass
class PublishedSample:
    """The fields of slime's Sample that a rollout function may set, with their types and defaults."""

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, str]] = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    train_metadata: dict[str, Any] | None = None


ARGUMENTS = SimpleNamespace(
    rollout_batch_size=2,
    rollout_temperature=1.0,
    advantage_estimator="grpo",
    rewards_normalization=False,
    normalize_advantages=False,
)


def filled() -> TrainingPool:
    """A group with a rollout of two rows, the second of which reached its largest length, and one with two turns."""
    pool = TrainingPool()
    forked = [
        one_turn("a", "p", [1, 2], [3, 4], policy_version=3),
        one_turn("a", "p", [5, 6, 8], [7], policy_version=4, finish_reason="length"),
    ]
    pool.add_group("p", [(forked, 1.0), ([one_turn("b", "p", [1], [2])], 0.0)])
    turns = [one_turn("c", "q", [1], [2]), one_turn("c", "q", [1, 2, 9], [5, 6])]
    pool.add_group("q", [(turns, 0.0), ([one_turn("d", "q", [1], [3])], 2.0)])
    return pool


def rollouts_of(pool: TrainingPool, **settings: Any) -> SlimeRollouts:
    return SlimeRollouts(lambda: pool, sample_type=PublishedSample, **settings)


def test_every_sample_has_what_slime_demands_of_it() -> None:
    groups = rollouts_of(filled())(ARGUMENTS, 0, object(), evaluation=False)
    assert [len(group) for group in groups] == [3, 2]
    samples = [sample for group in groups for sample in group]
    for sample in samples:
        assert sample.rollout_id is not None
        assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length < len(sample.tokens)
        assert set(sample.loss_mask) <= {0, 1}
    assert [sample.index for sample in samples] == [0, 1, 2, 3, 4]


def test_rows_of_a_rollout_share_its_id_and_its_advantage() -> None:
    first, second, other = rollouts_of(filled())(ARGUMENTS, 0, object())[0]
    assert first.rollout_id == second.rollout_id != other.rollout_id
    assert first.reward == second.reward == -other.reward == pytest.approx(0.5**0.5, abs=1e-3)
    assert [sample.metadata["raw_reward"] for sample in (first, second, other)] == [1.0, 1.0, 0.0]
    assert (first.weight_versions, second.weight_versions) == (["3"], ["4"])
    assert (first.status.value, second.status.value) == ("completed", "truncated")


def test_a_response_begins_with_the_first_sampled_token_and_what_the_agent_adds_is_masked() -> None:
    turns = rollouts_of(filled())(ARGUMENTS, 0, object())[1][0]
    assert turns.tokens == [1, 2, 9, 5, 6]
    assert (turns.response_length, turns.loss_mask) == (4, [1, 0, 1, 1])
    assert turns.rollout_log_probs == [-2.0, 0.0, -2.0, -2.0]


def test_a_row_with_several_advantages_is_several_samples() -> None:
    pool = TrainingPool()
    turns = [one_turn("a", "p", [1], [2], reward=1.0), one_turn("a", "p", [1, 2, 9], [5], reward=0.0)]
    pool.add_group("p", [(turns, None), ([one_turn("b", "p", [1], [3], reward=0.0)], None)])
    (group,) = rollouts_of(pool, rows=RowSettings(advantage="step"))(
        SimpleNamespace(**{**vars(ARGUMENTS), "rollout_batch_size": 1}), 0, object()
    )
    of_a = [sample for sample in group if sample.rollout_id == group[0].rollout_id]
    assert sorted(tuple(sample.loss_mask) for sample in of_a) == [(1,), (1,)]
    assert len({sample.reward for sample in of_a}) == 2


def test_a_batch_is_acknowledged_when_the_next_one_is_asked_for() -> None:
    pool = filled()
    rollouts = rollouts_of(pool)
    rollouts(ARGUMENTS, 0, object())
    assert pool.acknowledged == []
    pool.add_group("r", [([one_turn(f"r{n}", "r", [1], [n])], float(n)) for n in range(2)])
    pool.add_group("s", [([one_turn(f"s{n}", "s", [1], [n])], 1.0) for n in range(2)])
    groups = rollouts(ARGUMENTS, 1, object())
    assert pool.acknowledged == ["lease-1"]
    assert len(groups) == 1, "a group without a difference teaches nothing"


def test_batches_that_teach_nothing_are_skipped_until_there_are_too_many() -> None:
    pool = TrainingPool()
    for prompt in "abcd":
        pool.add_group(prompt, [([one_turn(f"{prompt}{n}", prompt, [1], [n])], 1.0) for n in range(2)])
    with pytest.raises(NothingLearned, match="from 2 batches in a row"):
        rollouts_of(pool, max_unlearnable=2)(ARGUMENTS, 0, object())


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"rewards_normalization": True}, "--disable-rewards-normalization"),
        ({"normalize_advantages": True}, "without --normalize-advantages"),
        ({"advantage_estimator": "ppo"}, "one of grpo, gspo, cispo"),
    ],
)
def test_arguments_by_which_slime_would_compute_other_advantages_are_refused(
    changed: dict[str, Any], told: str
) -> None:
    arguments = SimpleNamespace(**{**vars(ARGUMENTS), **changed})
    with pytest.raises(BadRequest, match=told):
        rollouts_of(filled())(arguments, 0, object())


def test_there_is_no_data_for_evaluation() -> None:
    with pytest.raises(BadRequest, match="--eval-interval"):
        rollouts_of(filled())(ARGUMENTS, 0, object(), evaluation=True)


def test_without_slime_it_says_so() -> None:
    with pytest.raises(BadRequest, match="neither slime nor miles is installed"):
        SlimeRollouts(filled)(ARGUMENTS, 0, object())
