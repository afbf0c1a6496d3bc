"""What a recorded call costs: this gateway compared with an engine, two bare proxies and two published gateways.

All have the same 32 clients and the same scripted engine: a request of 20 messages (8 KB), a reply of 256 tokens with
ids, log-probabilities and 2,048 prompt ids; streamed, 64 chunks of 4 tokens, as fast as they are read, and again with a
chunk every 10 ms, like a real engine. The figure is the CPU of a subject's processes per call, with recording;
`bare_recorder` is the reference. Ours writes into a DataPool on Ray, whose own CPU is reported separately. All are
measured in turns, and every call is checked to be recorded; a ratio is the median over rounds. The same question is
asked in our other dialects too.

    python -m benchmarks.gateway [--quick] [--without-peers]
"""

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rig.ray_cluster import start_ray  # isort: skip # sets Ray's environment, so it comes before Ray

from benchmarks.gateway_rig.answers import check_answers
from benchmarks.gateway_rig.ours import OurGateway, our_gateway
from benchmarks.gateway_rig.peers import peer_subjects
from benchmarks.gateway_rig.processes import LoadProcess, module, serving
from benchmarks.gateway_rig.rounds import KINDS, SLOW, STREAMED, UNSTREAMED, Course
from benchmarks.gateway_rig.spoken import CHAT, SPOKEN
from benchmarks.gateway_rig.subjects import bare_subjects
from benchmarks.report import report

CLIENTS = 32
STORE = 2**30
NAMESPACE = "benchmark"
PEERS = {"rllm": 5.0, "litellm": 20.0}
"""How many times our CPU a call must cost there."""
OF_BARE = {"unstreamed": 1.25, "streamed": 1.3, "paced": 1.3}
OF_CHAT = 1.3
OTHER_DIALECTS = tuple(name for name in SPOKEN if name != CHAT)
ADDED_MS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    rounds: int
    seconds: float


LONG, QUICK = Length(rounds=9, seconds=1.5), Length(rounds=3, seconds=0.7)


def say(text: str) -> None:
    print(text, flush=True)


@contextmanager
def set_up(folder: Path, *, peers: bool) -> Iterator[tuple[Course, OurGateway]]:
    with ExitStack() as stack:
        cluster = stack.enter_context(start_ray(object_store_memory=STORE))
        engine = stack.enter_context(serving(module("engine"), folder / "engine.log"))
        load = stack.enter_context(LoadProcess())
        ours = stack.enter_context(our_gateway(engine, folder, cluster.address, NAMESPACE))
        others = map(ours.speaking, OTHER_DIALECTS)
        subjects = [*stack.enter_context(bare_subjects(engine, folder)), ours, *others]
        if peers:
            subjects += stack.enter_context(peer_subjects(engine, folder))
        for subject in subjects:
            check_answers(subject)
        yield Course(engine, load, subjects), ours


def measure(course: Course, length: Length) -> dict[str, float]:
    figures: dict[str, float] = {}
    for kind in KINDS:
        course.run(kind, rounds=length.rounds, clients=CLIENTS, seconds=length.seconds, say=say)
        for subject in course.subjects:
            figures[f"{subject.name}_{kind.name}_calls_s"] = course.median(subject.name, kind, lambda r: r.calls_s)
            if subject.name != "direct":  # where the CPU would be the engine's
                figures[f"{subject.name}_{kind.name}_cpu_ms"] = course.median(subject.name, kind, lambda r: r.cpu_ms)
        figures[f"of_bare_{kind.name}"] = course.ratio("stepwell", "bare_recorder", kind)
        for dialect in OTHER_DIALECTS:
            figures[f"{dialect}_of_chat_{kind.name}"] = course.ratio(f"stepwell_{dialect}", "stepwell", kind)
        for peer in PEERS:
            if any(subject.name == peer for subject in course.subjects):
                figures[f"{peer}_of_ours_{kind.name}"] = course.ratio(peer, "stepwell", kind)
    return figures


def measure_latency(course: Course, length: Length) -> dict[str, float]:
    """With one client, who waits for each answer: of an engine that takes 200 ms, and of one that takes no time."""
    alone = Course(course.engine, course.load, [s for s in course.subjects if s.name in ("direct", "stepwell")])
    figures: dict[str, float] = {}
    for kind, name, seconds in ((SLOW, "p50_of_200", 3 * length.seconds), (UNSTREAMED, "p50", length.seconds)):
        alone.run(kind, rounds=length.rounds, clients=1, seconds=seconds, say=say)
        p50 = {s.name: [r.load.p50_ms for r in alone.rounds[s.name, kind.name]] for s in alone.subjects}
        added = statistics.median(a - b for a, b in zip(p50["stepwell"], p50["direct"], strict=True))
        figures |= {f"{subject}_{name}_ms": statistics.median(values) for subject, values in p50.items()}
        figures[f"added_{name}_ms"] = added
    return figures


def print_table(course: Course, figures: dict[str, float]) -> None:
    print(f"\n{'':>20}" + "".join(f"{kind.name + ' CPU ms':>20} {'calls/s':>8}" for kind in KINDS))
    for subject in course.subjects:
        cells = []
        for kind in KINDS:
            cpu, calls = (figures.get(f"{subject.name}_{kind.name}_{what}") for what in ("cpu_ms", "calls_s"))
            cells.append(f"{'–' if cpu is None else f'{cpu:.3f}':>20} {calls:>8,.0f}")
        print(f"{subject.name:>20}" + "".join(cells))
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description="What a recorded call costs.")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--without-peers", action="store_true", help="leave other people's gateways out")
    given = parser.parse_args()
    length = QUICK if given.quick else LONG
    with (
        tempfile.TemporaryDirectory() as folder,
        set_up(Path(folder), peers=not given.without_peers) as (course, ours),
    ):
        figures = measure(course, length) | measure_latency(course, length)
        figures["pool_cpu_ms"] = ours.pool_cpu_ms
    print_table(course, figures)
    targeted = [kind.name for kind in (UNSTREAMED, STREAMED)]
    peers = {} if given.without_peers else PEERS
    report(
        {name: round(value, 3) for name, value in figures.items()},
        at_most={f"of_bare_{kind}": bound for kind, bound in OF_BARE.items()}
        | {f"{dialect}_of_chat_{kind}": OF_CHAT for dialect in OTHER_DIALECTS for kind in targeted}
        | {"added_p50_of_200_ms": ADDED_MS},
        at_least={f"{peer}_of_ours_{kind}": bound for peer, bound in peers.items() for kind in targeted},
    )


if __name__ == "__main__":
    main()
