from stepwell.rewards.runner.runner import MOST_AT_ONCE, Prefetch


def test_it_grows_while_calls_are_fast_and_is_halved_by_a_slow_one() -> None:
    prefetch = Prefetch()
    sizes = []
    for _ in range(8):
        prefetch.learn(1e-5)
        sizes.append(prefetch.size)
    assert sizes[:3] == [2, 4, 8]
    assert sizes[-1] == MOST_AT_ONCE
    assert prefetch.is_fast
    sizes = []
    for _ in range(7):
        prefetch.learn(0.1)
        sizes.append(prefetch.size)
    assert sizes[:2] == [MOST_AT_ONCE // 2, MOST_AT_ONCE // 4]
    assert sizes[-1] == 1
    assert not prefetch.is_fast


def test_one_call_that_waited_for_a_cpu_does_not_make_a_fast_function_a_slow_one() -> None:
    prefetch = Prefetch()
    for _ in range(8):
        prefetch.learn(1e-5)
    prefetch.learn(0.1)
    assert prefetch.is_fast


def test_of_an_async_function_it_stays_as_it_is() -> None:
    prefetch = Prefetch(100)
    prefetch.learn(10.0)
    assert prefetch.size == 100
    assert not prefetch.is_fast
