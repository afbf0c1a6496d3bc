"""What the DataPool costs compared with bare Ray: steps of 2,048 + 256 tokens into it and out of it, on this machine.

Ingest: the same messages of 32 steps, eight in flight, go to a bare actor that only keeps them, to a shard, to a shard
with a journal (`--sync full`, then `normal`), to one with a journal in a PostgreSQL on this machine, if it is installed
(again `full`, then `normal`), and to four shards in turn. A step is a trajectory, a group has eight of them. All are
emptied after each round, outside the measured time. Fetch: 64 groups, 512 steps, under a lease, compared with `ray.put`
+ `ray.get` of that batch, and with a bare actor that holds it and returns it. Compared figures are measured in turns,
and a ratio is the median over rounds, so that other load on the machine affects all alike. Operations: see
pool_operations.py.

    python -m benchmarks.pool
"""

import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from rig.ray_cluster import start_ray  # isort: skip # sets Ray's environment, so it comes before Ray

import numpy as np
import ray

from benchmarks.pool_operations import measure_operations
from benchmarks.pool_rules import measure_depths
from benchmarks.report import parse_no_options, report
from rig.postgres import has_postgres, postgres_server
from stepwell.pool.actors import MAX_CONCURRENT_CALLS, ShardActor
from stepwell.pool.api.leasing import BatchRequest, LeasedGroups
from stepwell.pool.api.plan import JournalSync, Limits, PoolPlan
from stepwell.pool.slices.producing import AddSteps
from stepwell.steps.columns import Columns, pack
from stepwell.steps.step import Step, logprobs_array

PROMPT, RESPONSE = 2_048, 256
STEP_MB = 4 * (PROMPT + RESPONSE) / 1e6
A_MESSAGE, IN_FLIGHT, GROUP = 32, 8, 8
MESSAGES = 160
"""In a round: 47 MB of tokens, which is the most that any of the actors ever holds."""
BATCH = 512
INGEST_ROUNDS, FETCH_ROUNDS, DEPTH_ROUNDS = 15, 31, 9
SHARDS = 4
STORE = 2**30

numbers = count()


class BareActor:
    """Keeps what it gets."""

    def __init__(self) -> None:
        self._kept: list[Columns] = []
        self._batch: LeasedGroups | None = None

    async def submit_steps(self, steps: Columns, channel: str, group_size: int) -> list[str]:
        self._kept.append(steps)
        return ["accepted"] * len(steps)

    async def clear(self) -> None:
        self._kept.clear()

    async def hold(self, batch: LeasedGroups) -> None:
        self._batch = batch

    async def fetch_batch(self) -> LeasedGroups | None:
        return self._batch


class Side:
    """One or several actors that take messages in turn."""

    def __init__(self, actors: Sequence[Any], send: Callable[[Any, Columns], Any], empty: Callable[[Any], Any]) -> None:
        self._actors = actors
        self._send = send
        self._empty = empty

    def ingest(self, messages: Sequence[Columns]) -> float:
        """Steps a second. Empty again afterwards."""
        answers: deque[Any] = deque()
        start = time.perf_counter()
        for number, message in enumerate(messages):
            if len(answers) == IN_FLIGHT:
                self._check(answers.popleft())
            answers.append(self._send(self._actors[number % len(self._actors)], message))
        for answer in answers:
            self._check(answer)
        took = time.perf_counter() - start
        steps = sum(len(message) for message in messages)
        ray.get([self._empty(actor) for actor in self._actors])
        return steps / took

    def _check(self, answer: Any) -> None:
        verdicts = ray.get(answer)
        assert verdicts in (["accepted"] * A_MESSAGE, [["accepted"] * A_MESSAGE]), verdicts


def start(kind: type, *args: object) -> Any:
    return ray.remote(kind).options(max_concurrency=MAX_CONCURRENT_CALLS, num_cpus=0).remote(*args)


def start_shard(name: str, journal: str | None = None, sync: JournalSync = JournalSync.FULL) -> Any:
    return start(ShardActor, PoolPlan(name=name, limits=Limits(max_queue_size=10**6), journal=journal, sync=sync), name)


def submit_bare(actor: Any, message: Columns) -> Any:
    return actor.submit_steps.remote(message, "train", GROUP)


def submit(shard: Any, message: Columns) -> Any:
    return shard.run.remote([AddSteps(message, "train", GROUP)])


def clear(shard: Any) -> Any:
    return shard.clear.remote("train")


def take(shard: Any, wanted: BatchRequest, lease_uid: str) -> LeasedGroups:
    batch: LeasedGroups = ray.get(shard.take.remote(wanted, 60.0, lease_uid))
    return batch


@contextmanager
def all_sides() -> Iterator[dict[str, Side]]:
    """By the name their figures have."""
    with ExitStack() as stack:
        files = stack.enter_context(tempfile.TemporaryDirectory())
        sides = {
            "bare": Side([start(BareActor)], submit_bare, lambda actor: actor.clear.remote()),
            "shard": Side([start_shard("shard")], submit, clear),
            "journal": Side([start_shard("journal", files)], submit, clear),
            "journal_normal": Side([start_shard("journal_normal", files, JournalSync.NORMAL)], submit, clear),
        }
        if has_postgres():
            database = stack.enter_context(postgres_server()).url
            sides["postgres"] = Side([start_shard("postgres", database)], submit, clear)
            sides["postgres_normal"] = Side(
                [start_shard("postgres_normal", database, JournalSync.NORMAL)], submit, clear
            )
        sides["shards"] = Side([start_shard(f"shard-{n}") for n in range(SHARDS)], submit, clear)
        yield sides


def make_message() -> Columns:
    luck = np.random.default_rng(0)
    steps = [
        Step(
            prompt_ids=luck.integers(0, 150_000, PROMPT, dtype=np.int32),
            response_ids=luck.integers(0, 150_000, RESPONSE, dtype=np.int32),
            response_logprobs=logprobs_array(-luck.random(RESPONSE)),
            trajectory_uid="",
            prompt_uid="",
            is_last=True,
        )
        for _ in range(A_MESSAGE)
    ]
    return pack(steps)


def under_new_names(message: Columns) -> Columns:
    """The same tokens as other trajectories, so that no step is a duplicate."""
    uids = [f"{next(numbers):032x}" for _ in range(len(message))]
    prompts = [uids[place - place % GROUP] for place in range(len(uids))]
    return replace(message, uids=uids, trajectory_uids=uids, prompt_uids=prompts)


def measure_ingest() -> dict[str, float]:
    template = make_message()
    rates: dict[str, list[float]] = {}
    with all_sides() as sides:
        names = list(sides)
        for round_number in range(INGEST_ROUNDS + 1):
            messages = [under_new_names(template) for _ in range(MESSAGES)]
            turn = round_number % len(names)
            for name in names[turn:] + names[:turn]:
                rate = sides[name].ingest(messages)
                if round_number:  # the first warms up
                    rates.setdefault(name, []).append(rate)
            if round_number:
                print_round(
                    f"ingest {round_number}/{INGEST_ROUNDS}", {name: rates[name][-1] for name in names}, "steps/s"
                )
    figures: dict[str, float] = {}
    for name in names:
        figures[f"{name}_steps_s"] = round(statistics.median(rates[name]))
        figures[f"{name}_mb_s"] = round(statistics.median(rates[name]) * STEP_MB, 1)
    return figures | {
        **{f"{name}_of_bare": ratio(rates[name], rates["bare"]) for name in names if name not in ("bare", "shards")},
        "four_shards_of_one": ratio(rates["shards"], rates["shard"]),
    }


def measure_fetch() -> dict[str, float]:
    template = make_message()
    shard, bare = start_shard("fetched"), start(BareActor)
    wanted = BatchRequest(count=BATCH // GROUP, channel="train")
    times: dict[str, list[float]] = {"shard": [], "put_get": [], "actor": []}
    for round_number in range(FETCH_ROUNDS + 1):
        messages = [under_new_names(template) for _ in range(BATCH // A_MESSAGE)]
        ray.get([submit(shard, message) for message in messages])
        batch, fetched = timed(partial(take, shard, wanted, f"round {round_number}"))
        again, put_and_got = timed(partial(put_and_get, batch))
        ray.get(bare.hold.remote(batch))
        returned, given = timed(lambda: ray.get(bare.fetch_batch.remote()))
        assert len(batch.columns) == len(again.columns) == len(returned.columns) == BATCH
        ray.get(shard.ack.remote(batch.leases[0][1]))
        if round_number:  # the first warms up
            for name, took in zip(times, (fetched, put_and_got, given), strict=True):
                times[name].append(took * 1e3)
            if round_number % 10 == 0:
                print_round(f"fetch {round_number}/{FETCH_ROUNDS}", {name: of[-1] for name, of in times.items()}, "ms")
    return {
        "fetch_ms": round(statistics.median(times["shard"]), 2),
        "bare_put_get_ms": round(statistics.median(times["put_get"]), 2),
        "bare_actor_ms": round(statistics.median(times["actor"]), 2),
        "fetch_of_bare": ratio(times["put_get"], times["shard"]),
        "fetch_of_bare_actor": ratio(times["actor"], times["shard"]),
    }


def put_and_get(batch: LeasedGroups) -> LeasedGroups:
    got: LeasedGroups = ray.get(ray.put(batch))
    return got


def timed(fetch: Callable[[], LeasedGroups]) -> tuple[LeasedGroups, float]:
    """What it returns, and the seconds that it takes."""
    begin = time.perf_counter()
    batch = fetch()
    return batch, time.perf_counter() - begin


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 3)


def print_round(title: str, values: Mapping[str, float], unit: str) -> None:
    print(f"{title:>14} " + "  ".join(f"{name} {value:>8,.1f}" for name, value in values.items()), unit, flush=True)


def main() -> None:
    parse_no_options(__doc__)
    with start_ray(object_store_memory=STORE) as cluster:
        figures = measure_ingest() | measure_fetch() | measure_operations(cluster.address)
    shallow, deep = measure_depths(DEPTH_ROUNDS)
    figures |= {
        "core_us_per_step_at_1k": round(shallow, 2),
        "core_us_per_step_at_1m": round(deep, 2),
        "core_1m_of_1k": round(deep / shallow, 3),
    }
    for name, value in figures.items():
        print(f"{name:>24} {value:>12,}")
    report(
        figures,
        at_most={"core_1m_of_1k": 1.5, "operation_cpu_ms_at_500": 0.2, "call_cpu_ms_at_500": 0.2},
        at_least={
            "shard_of_bare": 0.8,
            "journal_of_bare": 0.5,
            "fetch_of_bare": 0.5,
            "fetch_of_bare_actor": 0.9,
            "four_shards_of_one": 0.9,  # not slower, but for noise
        },
    )


if __name__ == "__main__":
    main()
