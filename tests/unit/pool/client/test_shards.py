import subprocess
import sys
from collections import Counter

from stepwell.pool.api.plan import Layout


def test_a_prompt_uid_finds_the_same_shard_in_every_process() -> None:
    code = "from stepwell.pool.api.plan import Layout; print([Layout(1, 8).owner(f'p{i}') for i in range(100)])"
    runs = {subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout for _ in range(2)}
    assert runs == {f"{[Layout(1, 8).owner(f'p{i}') for i in range(100)]}\n".encode()}


def test_shards_share_the_load() -> None:
    counts = Counter(Layout(1, 8).owner(f"prompt-{i}") for i in range(8000))
    assert set(counts) == set(range(8))
    assert max(counts.values()) < 1.3 * min(counts.values())
