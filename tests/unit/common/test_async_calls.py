import pytest

from rig.waiting import until
from stepwell.common.async_calls import repeating


async def test_work_that_fails_is_logged_and_repeated(caplog: pytest.LogCaptureFixture) -> None:
    rounds = 0

    async def work() -> float:
        nonlocal rounds
        rounds += 1
        raise ZeroDivisionError("a fault of ours")

    async with repeating(work, pause_after_failure=0.0):
        await until(lambda: rounds > 2, "more rounds")
    assert "a fault of ours" in caplog.text
