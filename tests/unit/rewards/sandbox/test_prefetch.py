from stepwell.rewards.sandbox.prefetch import MOST_AT_ONCE, Window


def test_it_grows_while_calls_are_fast_and_is_one_after_a_slow_one() -> None:
    window = Window()
    sizes = []
    for _ in range(8):
        window.learn(1e-5)
        sizes.append(window.size)
    assert sizes[:3] == [2, 4, 8]
    assert sizes[-1] == MOST_AT_ONCE
    assert window.is_fast
    window.learn(0.1)
    assert window.size == 1
    assert not window.is_fast


def test_of_an_async_function_it_stays_as_it_is() -> None:
    window = Window(100)
    window.learn(10.0)
    assert window.size == 100
    assert not window.is_fast
