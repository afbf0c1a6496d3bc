from stepwell.rewards.sandbox.running_call import NOBODY, Cell


def test_a_withdrawn_sample_cannot_be_claimed_and_a_later_one_can() -> None:
    cell = Cell.make()
    assert cell.claim(3)
    assert cell.withdraw(5) == 3
    cell.write(NOBODY)
    assert not cell.claim(4)
    assert cell.read() == NOBODY
    assert not cell.claim(5)
    assert cell.claim(6)
    assert cell.read() == 6
    cell.close()
