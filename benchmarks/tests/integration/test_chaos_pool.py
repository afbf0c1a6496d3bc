"""benchmarks.chaos_pool with few kills: what was acknowledged is neither lost nor trained twice."""

from pathlib import Path

from benchmarks.chaos_pool import run_chaos


async def test_nothing_is_lost_or_trained_twice_while_shards_are_killed(namespace: str, tmp_path: Path) -> None:
    outcome = await run_chaos(namespace, tmp_path, kills=6)
    assert len(outcome.recoveries) == 6
    assert len(outcome.record.acknowledged) > 300
    assert outcome.record.lost == set()
    assert outcome.record.duplicated == set()
    assert outcome.record.damaged == set()
