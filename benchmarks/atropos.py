"""What the Atropos server costs: ours, with a DataPool on Ray behind it, compared with atroposlib's own server.

A group has 8 sequences of 2,048 tokens with log-probabilities, about 500 kB as JSON; a batch has 64 sequences. Both
servers get the same load in turns, and a ratio is the median over rounds. The figure is a server's own CPU: for ours,
that of the Atropos server and the pool shard together, from the first byte of a POST until the pool has confirmed it,
and until a served batch is acknowledged. Memory is the private memory of the same processes, resident minus shared: the
pool copies what it keeps, so no part of a queued group stays in Ray's shared object store. Eight clients send at once.

    python -m benchmarks.atropos [--quick]
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rig.ray_cluster import start_ray  # isort: skip # sets Ray's environment, so it comes before Ray

import orjson

from benchmarks.atropos_rig.clients import ARROW, JSON, Client, Probe, post_all
from benchmarks.atropos_rig.groups import SEQUENCES, Group, Templates, make_group, rescored
from benchmarks.atropos_rig.servers import BATCH_SIZE, Subject, our_server, their_server
from benchmarks.report import report
from stepwell.wire.scored_groups import group_from_json
from stepwell.wire.scored_groups_arrow import groups_from_arrow, groups_to_arrow

LENGTH, SMALL = 2_048, 32
CLIENTS = 8
BATCHES = 4
GROUPS = BATCHES * BATCH_SIZE // SEQUENCES
"""Of a round: sent, and then taken in so many batches."""
A_LIST = 100
SETTLING = 0.05
STORE = 2**30
AT_MOST = {
    "post_json_of_theirs": 0.5,
    "post_arrow_of_theirs": 0.1,
    "batch_json_of_theirs": 0.05,
    "batch_arrow_of_theirs": 0.02,
    "first_batch_deep_of_shallow": 2.0,
    "memory_of_theirs": 0.25,
    "status_env_ms": 20.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    rounds: int
    depth_rounds: int
    shallow: int
    """Groups queued before a first batch, in a queue that is short, and in one that is long."""
    deep: int


LONG = Length(rounds=9, depth_rounds=5, shallow=1_000, deep=10_000)
QUICK = Length(rounds=1, depth_rounds=1, shallow=100, deep=1_000)

Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Way:
    """Who is called, and in which format."""

    subject: Subject
    kind: str

    @property
    def name(self) -> str:
        return f"{self.subject.name}_{'json' if self.kind == JSON else 'arrow'}"

    def bodies(self, templates: Templates) -> Iterator[bytes]:
        if self.kind == JSON:
            return templates.json()
        return (groups_to_arrow([group_from_json(group)]) for group in templates.groups())

    def sequences(self, batch: bytes) -> int:
        if self.kind == JSON:
            return sum(len(group["tokens"]) for group in orjson.loads(batch)["batch"])
        return sum(map(len, groups_from_arrow(batch)))


def measure_memory(subject: Subject, templates: Templates) -> float:
    """Megabytes that a queued group takes, of a server that has seen few before."""
    subject.begin(group_size=SEQUENCES)
    send(subject, templates, GROUPS)
    before = subject.memory_bytes()
    send(subject, templates, 2 * GROUPS)
    return (subject.memory_bytes() - before) / (2 * GROUPS) / 1e6


def send(subject: Subject, templates: Templates, groups: int) -> None:
    post_all(subject.port, "/scored_data", islice(templates.json(), groups), clients=CLIENTS)
    assert subject.name == "atroposlib" or subject.queued() >= groups


def run_round(way: Way, templates: Templates) -> Figures:
    """CPU per POST and per batch, in ms."""
    way.subject.begin(group_size=SEQUENCES)
    bodies = list(islice(way.bodies(templates), GROUPS))
    with spent(way.subject) as posting:
        post_all(way.subject.port, "/scored_data", bodies, kind=way.kind, clients=CLIENTS)
    with spent(way.subject) as taking:
        batches = [way.subject.batch(way.kind) for _ in range(BATCHES)]
    assert [way.sequences(batch) for batch in batches] == [BATCH_SIZE] * BATCHES
    return {"post": posting[0] / GROUPS, "batch": taking[0] / BATCHES}


@contextmanager
def spent(subject: Subject) -> Iterator[list[float]]:
    """The CPU that the subject uses in the block, in ms, with what it does just afterwards."""
    found: list[float] = []
    before = subject.cpu_ms()
    yield found
    time.sleep(SETTLING)
    found.append(subject.cpu_ms() - before)


def measure_rounds(ways: Sequence[Way], templates: Templates, rounds: int) -> Figures:
    seen: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        turn = number % len(ways)
        for way in (*ways[turn:], *ways[:turn]):
            costs = run_round(way, templates)
            print(f"round {number}/{rounds} {way.name:>16}", {what: round(ms, 2) for what, ms in costs.items()})
            if number:  # the first warms up
                for what, ms in costs.items():
                    seen.setdefault(f"{way.name}_{what}", []).append(ms)
    figures = {f"{name}_cpu_ms": statistics.median(values) for name, values in seen.items()}
    for what in ("post", "batch"):
        for kind in ("json", "arrow"):
            ratios = zip(seen[f"stepwell_{kind}_{what}"], seen[f"atroposlib_json_{what}"], strict=True)
            figures[f"{what}_{kind}_of_theirs"] = statistics.median(ours / theirs for ours, theirs in ratios)
    return figures


def measure_status(subject: Subject, templates: Templates, rounds: int) -> float:
    """The slowest /status-env while a batch is served, in ms; the median over batches."""
    worst: list[float] = []
    for _ in range(rounds):
        env_id = subject.begin(group_size=SEQUENCES)
        send(subject, templates, GROUPS)
        for _ in range(BATCHES):
            probe = Probe(subject.port, env_id)
            with probe.asking():
                subject.batch()
            worst.append(max(probe.latencies_ms))
    return statistics.median(worst)


def measure_first_batch(subject: Subject, groups: Sequence[Group], rounds: int) -> float:
    """How long the first batch takes with all these groups queued, in ms; the median over rounds."""
    took: list[float] = []
    for _ in range(rounds):
        subject.begin(group_size=SEQUENCES)
        post_all(subject.port, "/scored_data_list", lists_of(groups), clients=2)
        client = Client(subject.port)
        client.json("GET", "/info")  # connected
        begin = time.perf_counter()
        client.ask("GET", "/batch")
        took.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(took)


def lists_of(groups: Sequence[Group]) -> Iterator[bytes]:
    for start in range(0, len(groups), A_LIST):
        yield orjson.dumps([rescored(group) for group in groups[start : start + A_LIST]])


def measure_depths(subject: Subject, length: Length, rounds: int) -> Figures:
    figures: Figures = {}
    for name, many in (("shallow", length.shallow), ("deep", length.deep)):
        groups = [make_group(SMALL) for _ in range(many)]
        figures[f"{subject.name}_first_batch_{name}_ms"] = measure_first_batch(subject, groups, rounds)
        print(f"{subject.name:>16} first batch of {many:,}: {figures[f'{subject.name}_first_batch_{name}_ms']:,.1f} ms")
    return figures


def measure(ours: Subject, theirs: Subject, length: Length) -> Figures:
    templates = Templates(LENGTH, GROUPS)
    figures = {f"{subject.name}_memory_mb": measure_memory(subject, templates) for subject in (theirs, ours)}
    figures["memory_of_theirs"] = figures["stepwell_memory_mb"] / figures["atroposlib_memory_mb"]
    figures |= measure_rounds([Way(theirs, JSON), Way(ours, JSON), Way(ours, ARROW)], templates, length.rounds)
    figures["status_env_ms"] = measure_status(ours, templates, length.rounds)
    figures["atroposlib_status_env_ms"] = measure_status(theirs, templates, 1)
    figures |= measure_depths(ours, length, length.depth_rounds) | measure_depths(theirs, length, 1)
    for subject, name in ((ours, ""), (theirs, "atroposlib_")):
        deep, shallow = (figures[f"{subject.name}_first_batch_{depth}_ms"] for depth in ("deep", "shallow"))
        figures[f"{name}first_batch_deep_of_shallow"] = deep / shallow
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description="What the Atropos server costs.")
    parser.add_argument("--quick", action="store_true", help="one round, and a shorter queue")
    length = QUICK if parser.parse_args().quick else LONG
    with (
        tempfile.TemporaryDirectory() as folder,
        start_ray(object_store_memory=STORE) as cluster,
        our_server(Path(folder), cluster.address, "benchmark") as ours,
        their_server(Path(folder)) as theirs,
    ):
        figures = measure(ours, theirs, length)
    for name, value in figures.items():
        print(f"{name:>40} {value:>12,.3f}")
    report({name: round(value, 4) for name, value in figures.items()}, at_most=AT_MOST)


if __name__ == "__main__":
    main()
