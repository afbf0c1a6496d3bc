import pytest

from stepwell.common import repeating
from tests.rig.waiting import until


async def test_a_look_that_fails_is_logged_and_looks_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(repeating, "AFTER_A_FAULT", 0.0)
    looks = 0

    async def look() -> float:
        nonlocal looks
        looks += 1
        raise ZeroDivisionError("a fault of ours")

    async with repeating.repeating(look):
        await until(lambda: looks > 2, "more looks")
    assert "a fault of ours" in caplog.text
