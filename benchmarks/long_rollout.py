"""What a long rollout costs on its way to a trainer: bytes shipped, and the time of fetch and merged().

A trajectory of 200 turns ends with 100,000 tokens. Each turn's prompt repeats everything before it. The pool ships the
prefix tree: each step brings only the tokens that it adds. The yardstick is measured in the same run, in turns with it:
the same steps with whole prompts, which are pickled and merged by a search for prefixes.

    python -m benchmarks.long_rollout
"""

import pickle
import statistics
import time

import numpy as np

from benchmarks.report import parse_no_options, report
from stepwell.pool.api.leasing import BatchRequest, LeasedGroups
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.producing import Registration
from stepwell.pool.client.batch import make_batch
from stepwell.pool.rules.pool import Pool
from stepwell.steps.columns import Columns, pack
from stepwell.steps.rows import MergedRows
from stepwell.steps.step import Step, ids_array

TURNS, FINAL_LENGTH = 200, 100_000
RESPONSE = 100
"""Tokens of each response. The rest of a turn is new context."""
ROUNDS = 7
TOKEN_BYTES = 4
"""Of an id. The log-probability (4) and the mask (1) of response tokens travel beside it."""


def rollout(turns: int = TURNS, final_length: int = FINAL_LENGTH, response: int = RESPONSE) -> list[Step]:
    tokens = ids_array(np.random.default_rng(0).integers(0, 150_000, final_length))
    logprobs = np.full(response, -0.5, np.float32)
    ends = np.linspace(0, final_length, turns + 1).astype(int)[1:].tolist()
    return [
        Step(
            prompt_ids=tokens[: end - response],
            response_ids=tokens[end - response : end],
            response_logprobs=logprobs,
            trajectory_uid="t",
            prompt_uid="p",
            uid=f"step-{turn}",
            started_at=float(turn),
        )
        for turn, end in enumerate(ends)
    ]


def filled(steps: list[Step]) -> Pool:
    pool = Pool(Limits())
    pool.ingest.register(Registration("t", "p", "train", 1))
    for step in steps:
        pool.ingest.submit(pack([step]))
    pool.ingest.complete("t", "p", 1.0)
    return pool


def take(pool: Pool) -> LeasedGroups:
    taken = pool.leasing.take(BatchRequest(count=1, channel="train"), "lease", 1e9)
    assert taken is not None
    pool.leasing.nack("lease")
    return taken


def through_a_pipe(columns: Columns) -> tuple[Columns, int]:
    """As another process gets it, and how many bytes that takes."""
    buffers: list[pickle.PickleBuffer] = []
    raw = pickle.dumps(columns, protocol=5, buffer_callback=buffers.append)
    copied = [bytes(buffer.raw()) for buffer in buffers]
    return pickle.loads(raw, buffers=copied), len(raw) + sum(map(len, copied))


def fetch_and_merge(pool: Pool, *, whole_prompts: bool) -> tuple[float, int, MergedRows]:
    start = time.perf_counter()
    taken = take(pool)
    columns, nbytes = through_a_pipe(taken.columns.expanded() if whole_prompts else taken.columns)
    merged = make_batch(columns, taken.group_sizes).merged()
    return time.perf_counter() - start, nbytes, merged


def main() -> None:
    parse_no_options(__doc__)
    pool = filled(rollout())
    times: dict[bool, list[float]] = {True: [], False: []}
    sizes: dict[bool, int] = {}
    for number in range(ROUNDS):
        for whole_prompts in (False, True):
            seconds, sizes[whole_prompts], merged = fetch_and_merge(pool, whole_prompts=whole_prompts)
            assert (len(merged), len(merged.tokens)) == (1, FINAL_LENGTH)
            times[whole_prompts].append(seconds)
        print(f"round {number + 1}/{ROUNDS}: tree {times[False][-1] * 1e3:.1f} ms, ", end="")
        print(f"whole prompts {times[True][-1] * 1e3:.1f} ms", flush=True)
    final_bytes = TOKEN_BYTES * FINAL_LENGTH + 5 * TURNS * RESPONSE
    tree, whole = statistics.median(times[False]), statistics.median(times[True])
    figures = {
        "bytes": sizes[False],
        "bytes_whole_prompts": sizes[True],
        "bytes_to_final_length": round(sizes[False] / final_bytes, 3),
        "fetch_and_merge_ms": round(tree * 1e3, 2),
        "fetch_and_merge_ms_whole_prompts": round(whole * 1e3, 2),
        "speedup": round(whole / tree, 1),
    }
    report(figures, at_most={"bytes_to_final_length": 1.2}, at_least={"speedup": 5.0})


if __name__ == "__main__":
    main()
