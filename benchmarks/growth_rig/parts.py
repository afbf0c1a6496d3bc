"""What one of each costs: a call, a trajectory, a step, a process. The sizes of deployments begin with these."""

import asyncio
from pathlib import Path

from benchmarks.footprint import CALLS, COUNTED, TRAJECTORIES, TURNS, alone, held_by_shard, measure_gateway
from benchmarks.gateway_rig.ours import NAME, our_gateway
from benchmarks.gateway_rig.processes import LoadProcess, module, serving
from benchmarks.gateway_rig.rounds import PACED, UNSTREAMED, Course
from rig.ray_cluster import RayCluster

CLIENTS = 32
ROUNDS, SECONDS = 7, 1.5
QUICK_ROUNDS, QUICK_SECONDS, FEWER = 1, 0.3, 20


def measure(cluster: RayCluster, folder: Path, quick: bool) -> dict[str, float]:
    share = FEWER if quick else 1
    opened, held = (alone(held_by_shard, TRAJECTORIES // share, turns) for turns in (0, TURNS))
    trajectory, with_steps = (nbytes / (TRAJECTORIES // share) for nbytes in (opened, held))
    figures = {
        "trajectory_bytes": trajectory,
        "step_bytes": (with_steps - trajectory) / TURNS,
        "step_bytes_counted": COUNTED,
        **asyncio.run(measure_gateway(CALLS // share)),
        **_measure_calls(cluster, folder, *((QUICK_ROUNDS, QUICK_SECONDS) if quick else (ROUNDS, SECONDS))),
    }
    print("parts: " + ", ".join(f"{name} {value:.4g}" for name, value in figures.items()), flush=True)
    return figures


def _measure_calls(cluster: RayCluster, folder: Path, rounds: int, seconds: float) -> dict[str, float]:
    """The CPU of a gateway for a call with 2,048 prompt and 256 response tokens: whole, or a chunk of 4 every 10 ms."""
    home = folder / "calls"
    home.mkdir()
    with (
        cluster.namespace() as namespace,
        serving(module("engine"), folder / "engine.log") as engine,
        LoadProcess() as load,
        our_gateway(engine, home, cluster.address, namespace) as ours,
    ):
        course = Course(engine, load, [ours])
        for kind in (UNSTREAMED, PACED):
            course.run(kind, rounds=rounds, clients=CLIENTS, seconds=seconds, say=lambda text: None)
    return {
        "call_cpu_ms": course.median(NAME, UNSTREAMED, lambda measured: measured.cpu_ms),
        "streamed_call_cpu_ms": course.median(NAME, PACED, lambda measured: measured.cpu_ms),
    }
