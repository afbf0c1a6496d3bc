from itertools import islice

import pytest

from stepwell.common.async_calls import Backoff, retry_while_unavailable

AT_ONCE = Backoff(first=0.0, longest=0.0)


class Flaky:
    """Fails the first calls with the given failures, then answers."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.calls = 0

    async def __call__(self) -> str:
        self.calls += 1
        if self.failures:
            raise self.failures.pop(0)
        return "an answer"


def test_a_pause_doubles_up_to_the_longest() -> None:
    assert list(islice(Backoff(first=0.5, longest=3.0).pauses(), 5)) == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_jitter_keeps_a_pause_within_its_share() -> None:
    pauses = list(islice(Backoff(first=1.0, longest=1.0, jitter=0.5).pauses(), 200))
    assert 0.5 <= min(pauses) < max(pauses) <= 1.5


async def test_a_call_is_repeated_while_it_is_unavailable() -> None:
    call = Flaky(ConnectionError(), ConnectionError())
    assert await retry_while_unavailable(call, ConnectionError, AT_ONCE) == "an answer"
    assert call.calls == 3


async def test_another_failure_is_final() -> None:
    call = Flaky(ConnectionError(), ValueError("final"))
    with pytest.raises(ValueError, match="final"):
        await retry_while_unavailable(call, (ConnectionError, OSError), AT_ONCE)
    assert call.calls == 2


async def test_the_last_attempt_raises_its_failure() -> None:
    call = Flaky(ConnectionError("1"), ConnectionError("2"), ConnectionError("3"))
    with pytest.raises(ConnectionError, match="2"):
        await retry_while_unavailable(call, ConnectionError, AT_ONCE, attempts=2)


async def test_no_pause_goes_beyond_the_time() -> None:
    call = Flaky(ConnectionError("too late"))
    with pytest.raises(ConnectionError, match="too late"):
        await retry_while_unavailable(call, ConnectionError, Backoff(first=60.0, longest=60.0), seconds=30.0)
    assert call.calls == 1


async def test_the_caller_sees_each_failure_and_may_change_the_pause() -> None:
    seen: list[tuple[str, float]] = []

    def before_pause(failure: ConnectionError, pause: float) -> float:
        seen.append((str(failure), pause))
        return 0.0

    call = Flaky(ConnectionError("a"), ConnectionError("b"))
    await retry_while_unavailable(call, ConnectionError, Backoff(30.0, 40.0), before_pause=before_pause)
    assert seen == [("a", 30.0), ("b", 40.0)]
