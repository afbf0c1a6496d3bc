from stepwell.steps.layout import reward_carrier


def test_the_last_trainable_step_carries_the_reward_or_else_the_last_one() -> None:
    assert reward_carrier([None, None, None]) == 2
    assert reward_carrier([None, None, "side_call:title"]) == 1
    assert reward_carrier(["a", "b"]) == 1
