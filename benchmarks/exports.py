"""A pool exported to Parquet, imported into another pool, and exported again: equal bit for bit, with rate and memory.

Trajectories have four turns, a group has eight of them, prompts grow to 1,000 tokens. The commands run as they do for
users, as separate processes. The figures of each are its whole time and its largest memory, with the pages of
Ray's shared memory that it read.

    python -m benchmarks.exports
    python -m benchmarks.exports --steps 4000
"""

import argparse
import asyncio
import filecmp
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rig.ray_cluster import RayCluster, start_ray  # isort: skip # sets Ray's environment, so it comes before Ray

import numpy as np
import pyarrow.parquet as pq
from stepwell.pool.actors import start_pool

from benchmarks.report import report
from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.api.producing import Registration
from stepwell.pool.client import PoolClient
from stepwell.steps.columns import pack
from stepwell.steps.step import Exactness, Step, logprobs_array

STEPS = 100_000
TURNS, GROUP = 4, 8
FIRST_PROMPT, ADDED, RESPONSE = 400, 100, 100
SHARDS = 2
MOST_MB = 500.0
STORE = 2**28
LOOK_EVERY = 0.02


class Run(NamedTuple):
    seconds: float
    peak_mb: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    steps = parser.parse_args().steps
    with start_ray(STORE) as cluster, cluster.namespace() as namespace, tempfile.TemporaryDirectory() as folder:
        figures = measure(cluster, namespace, Path(folder), steps)
    peaks = {name: MOST_MB for name in figures if name.endswith("_mb")}
    report(figures, at_most=peaks, at_least={"steps": steps, "bit_equal": 1})


def measure(cluster: RayCluster, namespace: str, folder: Path, steps: int) -> dict[str, float]:
    for name in ("first", "second"):
        start_pool(PoolPlan(name=name, shards=SHARDS, limits=Limits(max_queue_size=10**6)), namespace)
    asyncio.run(fill(PoolClient("first", namespace), steps))

    def stepwell(*words: object) -> Run:
        where = ("--ray-address", cluster.address, "--ray-namespace", namespace)
        return timed([sys.executable, "-m", "stepwell", *map(str, words), *where])

    one, two, lines = folder / "one.parquet", folder / "two.parquet", folder / "one.jsonl"
    runs = {
        "export": stepwell("export", "--to", one, "--data-pool-name", "first"),
        "import": stepwell("import", one, "--data-pool-name", "second"),
        "export_again": stepwell("export", "--to", two, "--data-pool-name", "second"),
        "export_jsonl": stepwell("export", "--to", lines, "--data-pool-name", "second"),
    }
    figures: dict[str, float] = {
        "steps": pq.read_metadata(one).num_rows,
        "bit_equal": filecmp.cmp(one, two, shallow=False),
        "parquet_file": round(one.stat().st_size / 1e6, 1),
        "jsonl_file": round(lines.stat().st_size / 1e6, 1),
    }
    for name, run in runs.items():
        figures |= {f"{name}_steps_s": round(steps / run.seconds), f"{name}_peak_mb": round(run.peak_mb, 1)}
    return figures


def timed(line: list[str]) -> Run:
    """Runs to its end, and fails if it does."""
    start = time.perf_counter()
    process, peak = subprocess.Popen(line), 0.0
    while process.poll() is None:
        peak = max(peak, most_memory(process.pid))
        time.sleep(LOOK_EVERY)
    if process.returncode:
        raise SystemExit(f"{' '.join(line)} failed with {process.returncode}")
    return Run(time.perf_counter() - start, peak)


def most_memory(pid: int) -> float:
    """Megabytes so far. Not from getrusage, which counts what the parent had when the process was started."""
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0.0
    return int(found[1]) / 1024 if found else 0.0


async def fill(pool: PoolClient, steps: int) -> None:
    luck = np.random.default_rng(0)
    for number in range(steps // (TURNS * GROUP)):
        uids = [f"trajectory-{number}-{n}" for n in range(GROUP)]
        registered = [Registration(uid, f"prompt-{number}", "train", GROUP, {"answer": "4"}) for uid in uids]
        session = [step for uid in uids for step in turns(uid, f"prompt-{number}", luck)]
        verdicts = await pool.submit_columns(pack(session), registered)
        assert set(verdicts) == {"accepted"}, verdicts


def turns(uid: str, prompt_uid: str, luck: np.random.Generator) -> Iterator[Step]:
    context = luck.integers(0, 150_000, FIRST_PROMPT, dtype=np.int32)
    for turn in range(TURNS):
        response = luck.integers(0, 150_000, RESPONSE, dtype=np.int32)
        is_last = turn == TURNS - 1
        yield Step(
            prompt_ids=context,
            response_ids=response,
            response_logprobs=logprobs_array(-luck.exponential(1.0, RESPONSE)),
            trajectory_uid=uid,
            prompt_uid=prompt_uid,
            uid=f"{uid}/{turn}",
            step_index=turn,
            policy_version=turn,
            is_last=is_last,
            reward=float(luck.normal()) if is_last else None,
            exactness=Exactness.ENGINE,
            finish_reason="stop",
            sampling={"temperature": 1.0, "top_p": 1.0, "max_tokens": 1024},
            started_at=1.7e9 + turn,
        )
        context = np.concatenate([context, response, luck.integers(0, 150_000, ADDED, dtype=np.int32)])


if __name__ == "__main__":
    main()
