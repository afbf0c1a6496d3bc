import sys
from typing import Any

import numpy as np
import pytest

from rig.builders import make_step, same_step
from stepwell.errors import BadRequest
from stepwell.pool.api.leasing import LeasedGroups, merge_leased_groups
from stepwell.pool.client.batch import Batch, batch_of, make_batch
from stepwell.steps.columns import Columns, pack
from stepwell.steps.step import Step


def two_groups() -> list[Step]:
    return [
        make_step("a", "p", step_index=0, response_ids=[3], reward=0.25),
        make_step("a", "p", step_index=1, reward=0.5),
        make_step("b", "p", step_index=0),
        make_step("b", "q", step_index=0, prompt_ids=[7, 8, 9], reward=0.0),
    ]


def make(**fields: Any) -> Batch:
    return make_batch(pack(two_groups()), [3, 1], **fields)


def uids(groups: list[list[list[Step]]]) -> list[list[list[tuple[str, int]]]]:
    return [[[(step.trajectory_uid, step.step_index) for step in t] for t in group] for group in groups]


def test_a_batch_has_as_many_items_as_groups() -> None:
    assert len(make()) == 2


def test_steps_come_as_groups_of_trajectories() -> None:
    batch = make()
    assert uids(batch.groups()) == [[[("a", 0), ("a", 1)], [("b", 0)]], [[("b", 0)]]]
    assert [len(trajectory) for trajectory in batch.trajectories()] == [2, 1, 1]


def test_a_trajectory_ends_with_its_group_even_if_the_next_begins_with_the_same_uid() -> None:
    batch = make()
    assert batch.trajectory_of_S.tolist() == [0, 0, 1, 2]
    assert batch.group_of_T.tolist() == [0, 0, 1]


def test_views_copy_no_token() -> None:
    batch = make()
    assert all(np.shares_memory(step.prompt_ids, batch.columns.tokens) for step in batch.steps())


def test_offsets_find_each_step_in_the_flat_arrays() -> None:
    batch = make()
    for i, step in enumerate(two_groups()):
        tokens = batch.columns.tokens[batch.token_offsets_S[i] : batch.token_offsets_S[i + 1]]
        assert tokens.tolist() == [*step.prompt_ids, *step.response_ids]
        logprobs = batch.columns.logprobs[batch.response_offsets_S[i] : batch.response_offsets_S[i + 1]]
        assert len(logprobs) == len(step.response_ids)


def test_a_rollouts_return_sums_what_is_scored_and_is_never_0_for_want_of_a_score() -> None:
    returns = make().rewards_T
    assert returns[[0, 2]].tolist() == [0.75, 0.0]
    assert np.isnan(returns[1])


def test_a_batch_is_new_unless_told_otherwise() -> None:
    assert make().attempts_G.tolist() == [0, 0]
    assert make().from_history_G.tolist() == [False, False]
    told = make(attempts=[0, 2], from_history=[True, False])
    assert told.attempts_G.tolist() == [0, 2]
    assert told.from_history_G.tolist() == [True, False]


@pytest.mark.parametrize("sizes", [[3], [3, 2], [3, 0, 1]])
def test_groups_that_do_not_divide_the_steps_are_refused(sizes: list[int]) -> None:
    with pytest.raises(BadRequest, match="do not divide 4 steps"):
        make_batch(pack(two_groups()), sizes)


def leased(columns: Columns, group_sizes: list[int], **fields: Any) -> LeasedGroups:
    count = len(group_sizes)
    defaults = {"opened_at": [0.0] * count, "attempts": [0] * count, "from_history": [False] * count}
    return LeasedGroups(
        **{"columns": columns, "group_sizes": group_sizes, "sources": [""] * count, **defaults, **fields}
    )


def test_the_groups_of_a_single_shard_are_not_copied() -> None:
    only = leased(pack(two_groups()), [3, 1])
    assert merge_leased_groups([only]) is only
    assert batch_of(only).columns is only.columns


def test_the_groups_of_several_shards_become_one_batch() -> None:
    other = [make_step("c", "r")]
    first = leased(pack(two_groups()), [3, 1], attempts=[0, 1], sources=["maths", "games"], leases=(("s0", "l0"),))
    second = leased(pack(other), [1], from_history=[True], leases=(("s1", "l1"),))
    both = batch_of(merge_leased_groups([first, second]))
    assert both.group_sizes_G.tolist() == [3, 1, 1]
    assert all(same_step(a, b) for a, b in zip(both.steps(), [*two_groups(), *other], strict=True))
    assert both.attempts_G.tolist() == [0, 1, 0]
    assert both.sources == ["maths", "games", ""]
    assert both.from_history_G.tolist() == [False, False, True]
    assert both.leases == (("s0", "l0"), ("s1", "l1"))


def test_padded_and_merged_take_the_batchs_steps() -> None:
    batch = make()
    padded = batch.padded(3, 2, pad_id=6)
    assert padded.prompts_S_P.tolist() == [[6, 1, 2], [6, 1, 2], [6, 1, 2], [7, 8, 9]]
    merged = batch.merged()
    assert merged.trajectory_of_R.tolist() == [0, 0, 1, 2]
    assert merged.group_of_R.tolist() == [0, 0, 0, 1]
    assert merged.padded(5).input_ids_R_L.shape == (4, 5)


def test_a_batch_without_groups_has_every_shape() -> None:
    batch = make_batch(pack([]), [])
    assert (batch.groups(), batch.trajectories(), batch.rewards_T.tolist()) == ([], [], [])
    assert batch.padded(3, 2).input_ids_S_T.shape == (0, 5)
    assert batch.merged().padded(4).input_ids_R_L.shape == (0, 4)


def test_shapes_are_made_from_read_only_arrays() -> None:
    """Such as Ray's object store gives."""
    batch = make()
    for name in type(batch.columns).__dataclass_fields__:
        if isinstance(array := getattr(batch.columns, name), np.ndarray):
            array.flags.writeable = False
    assert len(batch.padded(3, 2).kept_S) == 4
    assert len(batch.merged()) == 4
    assert len(batch_of(merge_leased_groups([leased(batch.columns, [3, 1])] * 2))) == 4


def test_tensors_and_padded_steps_have_the_temperatures() -> None:
    batch = make_batch(pack([make_step("a", temperature=0.7), make_step("b", temperature=1.3)]), [2])
    assert batch.to_torch()["temperatures_S"].tolist() == [0.7, 1.3]
    assert batch.padded(3, 2).to_torch()["temperatures_S"].tolist() == pytest.approx([0.7, 1.3])


def test_without_torch_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(BadRequest, match="to_torch needs PyTorch: pip install torch"):
        make().to_torch()


def test_groups_of_several_shards_are_joined_oldest_first_with_history_last() -> None:
    parts = [
        leased(pack(two_groups()), [3, 1], opened_at=[1.0, 4.0], from_history=[False, True]),
        leased(pack(two_groups()), [3, 1], opened_at=[2.0, 3.0]),
    ]
    both, first, second = (batch_of(merge_leased_groups(chosen)) for chosen in (parts, parts[:1], parts[1:]))
    assert both.opened_at_G.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert both.from_history_G.tolist() == [False, False, False, True]
    whole = [step.uid for batch in (first, second) for step in batch.steps()]
    assert sorted(step.uid for step in both.steps()) == sorted(whole)
    expected = [first.groups()[0], *second.groups(), first.groups()[1]]
    for got, wanted in zip(both.groups(), expected, strict=True):
        assert all(same_step(a, b) for t, u in zip(got, wanted, strict=True) for a, b in zip(t, u, strict=True))
