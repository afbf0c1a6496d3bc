"""The memory of a batch is used again, but never while somebody can read the batch."""

import numpy as np

from stepwell.pool.state.reused_memory import WORTH_KEEPING, ReusedMemory

LENGTH = WORTH_KEEPING[0] // 4


def parts(value: int, length: int = LENGTH) -> list[np.ndarray[tuple[int], np.dtype[np.int32]]]:
    return [np.full(length // 2, value, np.int32), np.full(length - length // 2, value, np.int32)]


def address(array: np.ndarray[tuple[int], np.dtype[np.int32]]) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_that_nobody_reads_is_used_again() -> None:
    memory = ReusedMemory(np.int32)
    joined = memory.join(parts(1))
    first = address(joined)
    del joined
    assert address(memory.join(parts(2))) == first


def test_a_batch_stays_as_it_is_while_it_or_a_part_of_it_is_kept() -> None:
    memory = ReusedMemory(np.int32)
    first = memory.join(parts(1))
    second = memory.join(parts(2))
    assert first.tolist() == [1] * LENGTH
    a_part, buffer = second[5:10], memory.join(parts(3)).data
    del second
    memory.join(parts(4))
    memory.join(parts(5))
    assert a_part.tolist() == [2] * 5
    assert set(buffer.tolist()) == {3}


def test_batches_of_any_length_are_whole() -> None:
    memory = ReusedMemory(np.int32)
    for length in (0, 1, LENGTH - 1, LENGTH, 3 * LENGTH, LENGTH + 1, WORTH_KEEPING[1] // 4 + 1):
        joined = memory.join(parts(length, length))
        assert (len(joined), joined.dtype.name, bool((joined == length).all())) == (length, "int32", True)
    assert memory.join([]).dtype == np.int32
