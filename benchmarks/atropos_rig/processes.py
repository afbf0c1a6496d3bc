"""What a server has used: the CPU and the memory of all the processes that it is made of."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.gateway_rig.processes import PAGE


def cpu_ms(pids: Sequence[int]) -> float:
    """To the nanosecond, unlike the ticks in `stat`; a thread that has ended is no longer counted."""
    return sum(_thread_ns(thread) for pid in pids for thread in Path(f"/proc/{pid}/task").iterdir()) / 1e6


def memory_bytes(pids: Sequence[int]) -> int:
    """Resident minus shared: Ray's object store is mapped into every process that has seen an object."""
    return sum(_private_pages(pid) for pid in pids) * PAGE


def _thread_ns(thread: Path) -> int:
    return int((thread / "schedstat").read_text().split()[0])


def _private_pages(pid: int) -> int:
    resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[1:3]
    return int(resident) - int(shared)
