"""A network namespace with one link to this machine, which can be cut. Needs root, and Linux's `ip` and `tc`."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

SUBNETS = range(1, 250)
"""Of 10.213.0.0/16. The first free one is used."""


@dataclass(frozen=True, slots=True)
class NetworkNamespace:
    name: str
    outside: str
    """The address of this machine, as the namespace sees it."""
    inside: str
    """The address of processes in the namespace."""

    @property
    def device(self) -> str:
        """The end of the link in the namespace. The other end has the name of the namespace."""
        return f"{self.name}in"

    def command(self, *line: str) -> list[str]:
        """The command line that runs a program in the namespace."""
        return ["ip", "netns", "exec", self.name, *line]

    def cut(self) -> None:
        """From now on packets vanish in both directions, as behind a switch that fails: no side is told."""
        _run("tc", "qdisc", "add", "dev", self.name, "root", "blackhole")
        _run(*self.command("tc", "qdisc", "add", "dev", self.device, "root", "blackhole"))

    def mend(self) -> None:
        _run("tc", "qdisc", "del", "dev", self.name, "root")
        _run(*self.command("tc", "qdisc", "del", "dev", self.device, "root"))


@contextmanager
def network_namespace() -> Iterator[NetworkNamespace]:
    """It is gone afterwards, with its link. Processes in it are to be ended before."""
    with _subnet() as (name, subnet):
        made = NetworkNamespace(name, outside=f"10.213.{subnet}.1", inside=f"10.213.{subnet}.2")
        try:
            _run("ip", "netns", "add", name)
            _run("ip", "link", "set", made.device, "netns", name)
            _run("ip", "address", "add", f"{made.outside}/30", "dev", name)
            _run("ip", "link", "set", name, "up")
            for line in (
                f"address add {made.inside}/30 dev {made.device}",
                f"link set {made.device} up",
                "link set lo up",
            ):
                _run("ip", "-n", name, *line.split())
            yield made
        finally:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def can_make_namespaces() -> bool:
    return os.geteuid() == 0 and None not in (shutil.which("ip"), shutil.which("tc"))


@contextmanager
def _subnet() -> Iterator[tuple[str, int]]:
    """Makes the pair of network devices, whose name says that a subnet is used."""
    for subnet in SUBNETS:
        name = f"stepwell{subnet}"
        with suppress(subprocess.CalledProcessError):
            _run("ip", "link", "add", name, "type", "veth", "peer", "name", f"{name}in")
            break
    else:
        raise RuntimeError("no network device could be made")
    try:
        yield name, subnet
    finally:
        subprocess.run(["ip", "link", "delete", name], check=False, capture_output=True)


def _run(*line: str) -> None:
    subprocess.run(line, check=True, capture_output=True)
