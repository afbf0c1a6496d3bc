import numpy as np

from stepwell.steps.layout import firsts_of, in_parts_of, reward_carrier


def test_the_last_trainable_step_carries_the_reward_or_else_the_last_one() -> None:
    assert reward_carrier([None, None, None]) == 2
    assert reward_carrier([None, None, "side_call:title"]) == 1
    assert reward_carrier(["a", "b"]) == 1


def test_parts_begin_where_their_number_changes() -> None:
    assert firsts_of(np.array([0, 0, 1, 2, 2])).tolist() == [0, 2, 3]
    assert firsts_of(np.zeros(0, np.int64)).tolist() == []


def test_a_flag_counts_for_all_elements_of_its_part() -> None:
    flags, part_of = np.array([False, True, False, False]), np.array([0, 1, 1, 2])
    assert in_parts_of(flags, part_of).tolist() == [False, True, True, False]
    assert in_parts_of(np.zeros(4, np.bool_), part_of).tolist() == [False] * 4
    assert in_parts_of(np.zeros(0, np.bool_), np.zeros(0, np.int64)).tolist() == []
