"""What submit + take cost per step in the rules and the state of a pool, with a short and with a long queue.

Each round keeps the queue at its depth: a group of 8 trajectories of 2 steps goes in, the oldest goes out. Each depth
has its own process (with one heap, garbage collection of the long queue would affect the short one), and they are
measured in turns, so that other load on the machine affects both alike.

    python -m benchmarks.pool_rules
"""

import gc
import multiprocessing
import statistics
import time
from itertools import count
from multiprocessing.connection import Connection

from benchmarks.report import parse_no_options, report
from stepwell.pool.api.leasing import BatchRequest
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.producing import Registration
from stepwell.pool.rules.pool import Pool
from stepwell.steps.columns import pack
from stepwell.steps.step import Step, ids_array, logprobs_array

SHALLOW, DEEP = 1_000, 1_000_000
GROUP, STEPS = 8, 2
ROUNDS, GROUPS_PER_ROUND = 15, 300
PROMPT = ids_array(range(64))
RESPONSE = ids_array(range(16))
LOGPROBS = logprobs_array([-0.5] * 16)

numbers = count()


def add_group(pool: Pool) -> None:
    number = next(numbers)
    prompt_uid = f"p{number}"
    trajectory_uids = [f"t{number}-{t}" for t in range(GROUP)]
    for trajectory_uid in trajectory_uids:
        pool.ingest.register(Registration(trajectory_uid, prompt_uid, "train", GROUP))
    pool.ingest.submit(pack([make_step(uid, prompt_uid, s) for uid in trajectory_uids for s in range(STEPS)]))
    for trajectory_uid in trajectory_uids:
        pool.ingest.complete(trajectory_uid, prompt_uid, 1.0)


def make_step(trajectory_uid: str, prompt_uid: str, index: int) -> Step:
    return Step(
        prompt_ids=PROMPT.copy(),
        response_ids=RESPONSE.copy(),
        response_logprobs=LOGPROBS.copy(),
        trajectory_uid=trajectory_uid,
        prompt_uid=prompt_uid,
        uid=f"{trajectory_uid}-{index}",
        started_at=float(index),
    )


def filled(steps: int) -> Pool:
    pool = Pool(Limits(max_queue_size=10**9))
    for _ in range(steps // (GROUP * STEPS)):
        add_group(pool)
    return pool


def microseconds_per_step(pool: Pool) -> float:
    start = time.perf_counter()
    for _ in range(GROUPS_PER_ROUND):
        add_group(pool)
        lease = f"lease-{next(numbers)}"
        pool.leasing.take(BatchRequest(count=1, channel="train"), lease, 0.0)
        pool.leasing.ack(lease)
    return (time.perf_counter() - start) / (GROUPS_PER_ROUND * GROUP * STEPS) * 1e6


def serve(depth: int, asked: Connection) -> None:
    """Hold a queue of that depth, and answer every question with the cost of one round."""
    pool = filled(depth)
    gc.collect()
    while asked.recv():
        asked.send(microseconds_per_step(pool))


def measure_depths(rounds: int) -> tuple[float, float]:
    """Microseconds a step, shallow and deep."""
    spawn = multiprocessing.get_context("spawn")
    workers: dict[int, Connection] = {}
    for depth in (SHALLOW, DEEP):
        workers[depth], theirs = spawn.Pipe()
        spawn.Process(target=serve, args=(depth, theirs), daemon=True).start()
    print(f"filling queues of {SHALLOW:,} and {DEEP:,} steps", flush=True)
    costs: dict[int, list[float]] = {depth: [] for depth in workers}
    for round_number in range(rounds):
        for depth, worker in workers.items():
            worker.send(True)
            costs[depth].append(worker.recv())
        print(f"round {round_number + 1}/{rounds}: " + ", ".join(f"{c[-1]:.1f} µs" for c in costs.values()), flush=True)
    for worker in workers.values():
        worker.send(False)
    return statistics.median(costs[SHALLOW]), statistics.median(costs[DEEP])


def main() -> None:
    parse_no_options(__doc__)
    shallow, deep = measure_depths(ROUNDS)
    figures = {
        "us_per_step_at_1k": round(shallow, 2),
        "us_per_step_at_1m": round(deep, 2),
        "ratio": round(deep / shallow, 3),
    }
    report(figures, at_most={"ratio": 2.0})


if __name__ == "__main__":
    main()
