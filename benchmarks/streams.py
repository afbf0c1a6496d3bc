"""The capacity of one gateway process: thousands of slow streams at once, then a burst of calls.

Streams: 2,000 of them, each with 5 chunks of 4 tokens per second, all open together for 60 s; every token that the
engine sent must be in the pool. Burst: 16,000 clients connect, then all send their call at once; none may fail. Further
figures: the lag of the gateway's event loop (and the share of time without a free core), the latencies that agents saw,
and the gateway's memory.

    python -m benchmarks.streams [--streams 2000] [--seconds 60] [--calls 16000]
"""

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path

from rig.ray_cluster import start_ray  # isort: skip # sets Ray's environment, so it comes before Ray

from benchmarks.gateway_rig import canned
from benchmarks.gateway_rig.load import Load, Order
from benchmarks.gateway_rig.metrics import loop_lag
from benchmarks.gateway_rig.ours import OurGateway, our_gateway
from benchmarks.gateway_rig.processes import (
    LoadProcess,
    Server,
    forget_peak,
    memory_bytes,
    module,
    peak_memory_bytes,
    serving,
    starved_seconds,
)
from benchmarks.gateway_rig.subjects import CHAT_PATH, Door
from benchmarks.report import report

CHUNKS_A_SECOND = 5
DIRECT_SECONDS = 5
TRAJECTORIES = 2_000
"""Among which the crowd's calls are shared out."""
STORE = 2**30
MB = 2**20


class Watched:
    """Our gateway under one load, with what is told of it besides."""

    def __init__(self, ours: OurGateway, load: LoadProcess) -> None:
        self._ours, self._load = ours, load
        self.figures: dict[str, float] = {}

    def run(self, name: str, doors: list[Door], *, stream: bool, spread: float = 0.0) -> Load:
        server = self._ours.server
        forget_peak(server.pid)
        before, lag = memory_bytes(server.pid), loop_lag(server, self._ours.key)
        cpu, starved = self._ours.cpu(), starved_seconds(server.pid)
        paths, keys = [door.path for door in doors], [door.key for door in doors]
        order = Order(port=server.port, paths=paths, keys=keys, stream=stream, seconds=0, spread=spread)
        load = self._load.run(order)
        self._ours.settle(load.calls)
        lag = loop_lag(server, self._ours.key).since(lag)
        self.figures |= {
            f"{name}_errors": sum(load.errors.values()),
            f"{name}_seconds": round(load.seconds, 1),
            f"{name}_cpu_share": round((self._ours.cpu() - cpu) / load.seconds, 3),
            f"{name}_starved_share": round((starved_seconds(server.pid) - starved) / load.seconds, 3),
            f"{name}_loop_lag_p99_ms": round(lag.quantile(0.99) * 1e3, 1),
            f"{name}_memory_start_mb": round(before / MB),
            f"{name}_memory_peak_mb": round(peak_memory_bytes(server.pid) / MB),
        }
        if load.errors:
            print(f"{name}: {load.errors}", flush=True)
        return load


def opening_seconds(seconds: int) -> int:
    """How long it takes to open the streams, beyond the time for which all are held."""
    return max(1, seconds // 6)


def direct_gap(engine: Server, load: LoadProcess, streams: int) -> float:
    """What clients see of the engine itself, for comparison: how late this machine is on its own account."""
    engine.ask("/rig/pace", {"gap": 1 / CHUNKS_A_SECOND, "chunks": CHUNKS_A_SECOND * DIRECT_SECONDS}, method="PUT")
    order = Order(port=engine.port, paths=[CHAT_PATH] * streams, keys=[""] * streams, stream=True, seconds=0)
    return load.run(order).gap_p99_ms


def hold_streams(watched: Watched, ours: OurGateway, engine: Server, streams: int, seconds: int) -> None:
    opening = opening_seconds(seconds)
    chunks = CHUNKS_A_SECOND * (seconds + opening)
    engine.ask("/rig/pace", {"gap": 1 / CHUNKS_A_SECOND, "chunks": chunks}, method="PUT")
    print(f"{streams:,} streams of {chunks} chunks", flush=True)
    doors, sent_before = ours.open(streams), engine.ask("/rig/sent")["tokens"]
    load = watched.run("streams", doors, stream=True, spread=0.8 * opening)
    sent = engine.ask("/rig/sent")["tokens"] - sent_before
    recorded = ours.new_steps()
    watched.figures |= {
        "streams_all_open_s": round(load.all_open, 1),
        "streams_gap_p99_ms": round(load.gap_p99_ms, 1),
        "tokens_sent": sent,
        "tokens_not_recorded": sent - (recorded.tokens - recorded.steps * canned.PROMPT),
        "chunks_not_seen": streams * (chunks + 2) - load.events,  # with the opening and [DONE]
    }


def crowd(watched: Watched, ours: OurGateway, calls: int) -> None:
    print(f"{calls:,} calls at once", flush=True)
    trajectories = ours.open(min(calls, TRAJECTORIES))
    doors = [trajectories[number % len(trajectories)] for number in range(calls)]
    load = watched.run("crowd", doors, stream=False)
    watched.figures |= {
        "crowd_calls": load.calls,
        "crowd_p50_s": round(load.p50_ms / 1e3, 2),
        "crowd_p99_s": round(load.p99_ms / 1e3, 2),
        "crowd_not_recorded": calls - ours.new_steps().steps,
    }


def measure(folder: Path, streams: int, seconds: int, calls: int) -> dict[str, float]:
    with ExitStack() as stack:
        cluster = stack.enter_context(start_ray(object_store_memory=STORE))
        engine = stack.enter_context(serving(module("engine"), folder / "engine.log"))
        load = stack.enter_context(LoadProcess())
        length = CHUNKS_A_SECOND * (seconds + opening_seconds(seconds)) * canned.A_CHUNK
        ours = stack.enter_context(our_gateway(engine, folder, cluster.address, "benchmark", response_length=length))
        watched = Watched(ours, load)
        watched.figures["direct_gap_p99_ms"] = round(direct_gap(engine, load, streams), 1)
        hold_streams(watched, ours, engine, streams, seconds)
        crowd(watched, ours, calls)
        return watched.figures


def main() -> None:
    parser = argparse.ArgumentParser(description="How much one gateway process holds.")
    parser.add_argument("--streams", type=int, default=2_000)
    parser.add_argument("--seconds", type=int, default=60, help="for which all streams are open at once")
    parser.add_argument("--calls", type=int, default=16_000, help="sent at one moment")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), given.streams, given.seconds, given.calls)
    for name, value in figures.items():
        print(f"{name:>26} {value:>12,}")
    nothing = ("streams_errors", "tokens_not_recorded", "chunks_not_seen", "crowd_errors", "crowd_not_recorded")
    report(figures, at_most=dict.fromkeys(nothing, 0), at_least={"streams_all_open_s": given.seconds})


if __name__ == "__main__":
    main()
