"""What one hostile client can do to a gateway, and to the agents beside it.

Each attack runs for some seconds against the real command, without the bounds on requests and with them; meanwhile
honest agents make calls. Figures: the gateway's memory at its peak, as a multiple of what it has when idle, and the
honest calls' p99, as a multiple of that without an attack. Attackers are nice: on a machine with few cores they would
otherwise be measured themselves.

    python -m benchmarks.attacks [--seconds 10]
"""

import argparse
import select
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rig.ray_cluster import start_ray  # isort: skip # sets Ray's environment, so it comes before Ray

from benchmarks.attacks_rig.attackers import ATTACKS
from benchmarks.gateway_rig.load import Load, Order
from benchmarks.gateway_rig.ours import OurGateway, our_gateway
from benchmarks.gateway_rig.processes import LoadProcess, forget_peak, memory_bytes, module, peak_memory_bytes, serving
from benchmarks.report import report

HONEST = 4
"""Agents."""
STORE = 2**30
MB = 2**20
DOCUMENTED = 256 * MB
"""What bodies in flight of one agent may take beside (docs/operations/security.md): its quota of 128 MiB, twice."""
BEGIN_SECONDS = 120.0
WITHOUT_BOUNDS = "benchmarks.attacks_rig.unbounded_gateway"


@dataclass(frozen=True, slots=True)
class Suffered:
    memory: float
    """Times the idle memory."""
    beyond_mb: float
    """Above 1.5 times the idle memory and what is documented."""
    p99: float
    """Times that of honest calls without an attack."""
    failed: int
    """Honest calls."""


def honest_calls(ours: OurGateway, load: LoadProcess, seconds: float) -> Load:
    doors = ours.open(HONEST)
    order = Order(
        port=ours.server.port,
        paths=[door.path for door in doors],
        keys=[door.key for door in doors],
        stream=False,
        seconds=seconds,
    )
    return load.run(order)


def wait_for(attackers: "subprocess.Popen[bytes]") -> None:
    """Until all of their connections have sent something. They are nice: on a busy machine that takes a while."""
    assert attackers.stdout is not None
    readable, _, _ = select.select([attackers.stdout], [], [], BEGIN_SECONDS)
    if not readable or not attackers.stdout.readline():
        raise SystemExit(f"waited {BEGIN_SECONDS:.0f} s for the attack to begin: is the machine busy?")


def attacked(ours: OurGateway, load: LoadProcess, attack: str, seconds: float) -> Suffered:
    pid = ours.server.pid
    calm = honest_calls(ours, load, seconds / 2)
    (door,) = ours.open(1)
    idle = memory_bytes(pid)
    forget_peak(pid)
    flags = (attack, str(ours.server.port), door.path, door.key, str(seconds + 60))
    command = ["nice", "-n", "19", sys.executable, "-m", "benchmarks.attacks_rig.attackers", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as attackers:
        try:
            wait_for(attackers)
            found = honest_calls(ours, load, seconds)
        finally:
            attackers.kill()
    peak = peak_memory_bytes(pid)
    return Suffered(
        memory=peak / idle,
        beyond_mb=max(0.0, (peak - 1.5 * idle - DOCUMENTED) / MB),
        p99=found.p99_ms / calm.p99_ms,
        failed=sum(found.errors.values()),
    )


def measure(folder: Path, seconds: float) -> dict[str, float]:
    figures: dict[str, float] = {}
    with ExitStack() as stack:
        cluster = stack.enter_context(start_ray(object_store_memory=STORE))
        engine = stack.enter_context(serving(module("engine"), folder / "engine.log"))
        load = stack.enter_context(LoadProcess())
        for when, program in (("before", WITHOUT_BOUNDS), ("after", "stepwell.gateway")):
            for attack in ATTACKS:
                place = folder / f"{when}-{attack}"
                place.mkdir()
                with our_gateway(engine, place, cluster.address, f"{when}-{attack}", program=program) as ours:
                    suffered = attacked(ours, load, attack, seconds)
                print(f"{when:>6} {attack:>10} {suffered}", flush=True)
                figures |= {
                    f"{attack}_memory_{when}": round(suffered.memory, 2),
                    f"{attack}_beyond_mb_{when}": round(suffered.beyond_mb),
                    f"{attack}_p99_{when}": round(suffered.p99, 2),
                    f"{attack}_failed_{when}": suffered.failed,
                }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description="What a hostile client can do to a gateway.")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each attack")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), given.seconds)
    most = {f"{attack}_beyond_mb_after": 0.0 for attack in ATTACKS}
    most |= {f"{attack}_p99_after": 2.0 for attack in ATTACKS}
    most |= {f"{attack}_failed_after": 0.0 for attack in ATTACKS}
    report(figures, at_most=most)


if __name__ == "__main__":
    main()
