from stepwell.rewards.runner.messages import NO_CALL, RunningCallSlot


def test_a_withdrawn_sample_cannot_be_claimed_and_a_later_one_can() -> None:
    slot = RunningCallSlot.make()
    assert slot.claim(3)
    assert slot.withdraw(5) == 3
    slot.write(NO_CALL)
    assert not slot.claim(4)
    assert slot.read() == NO_CALL
    assert not slot.claim(5)
    assert slot.claim(6)
    assert slot.read() == 6
    slot.close()
