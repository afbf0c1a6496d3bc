from stepwell.rewards.sandbox.queue import MOST_AT_ONCE, Prefetch


def test_it_grows_while_calls_are_fast_and_is_one_after_a_slow_one() -> None:
    prefetch = Prefetch()
    sizes = []
    for _ in range(8):
        prefetch.learn(1e-5)
        sizes.append(prefetch.size)
    assert sizes[:3] == [2, 4, 8]
    assert sizes[-1] == MOST_AT_ONCE
    assert prefetch.is_fast
    prefetch.learn(0.1)
    assert prefetch.size == 1
    assert not prefetch.is_fast


def test_of_an_async_function_it_stays_as_it_is() -> None:
    prefetch = Prefetch(100)
    prefetch.learn(10.0)
    assert prefetch.size == 100
    assert not prefetch.is_fast
