"""benchmarks.forgetting for a moment, and as it is. In CI, what the loop computes counts; at night, the pause."""

from pathlib import Path

import pytest

from benchmarks import forgetting


async def test_people_are_forgotten_while_others_talk(tmp_path: Path) -> None:
    figures = await forgetting.measure(tmp_path, megabytes=5, rounds=2, seconds=0.2)
    assert figures["journal_mb"] >= 5
    assert min(figures["forgetting_longest_ms"], figures["alone_longest_ms"], figures["forget_s"]) > 0
    assert figures["forgetting_busy_ms"] <= forgetting.MORE_MS


@pytest.mark.nightly
async def test_a_shard_hardly_pauses_for_it(tmp_path: Path) -> None:
    figures = await forgetting.measure(
        tmp_path, megabytes=forgetting.MEGABYTES, rounds=forgetting.ROUNDS, seconds=forgetting.SECONDS
    )
    assert figures["more_ms"] <= forgetting.MORE_MS
