"""How atroposlib's processes are run: where they live, what they are told, and how they end."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import MappingProxyType

from rig.gateways import free_port
from rig.waiting import answers, wait_until

CHECKOUT = Path(__file__).parents[2]
START_TIMEOUT_S = 120.0
SETTINGS = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "disabled",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}


@cache
def atropos_python() -> Path:
    """The interpreter of atroposlib's environment, which is built first where it is missing."""
    script = CHECKOUT / "scripts" / "atropos_env.py"
    built = subprocess.run([sys.executable, script], check=True, stdout=subprocess.PIPE, text=True)
    return Path(built.stdout.splitlines()[-1])


@contextmanager
def running(
    command: Sequence[str], log: Path, more: Mapping[str, str] = MappingProxyType({})
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own, with a HOME beside its log; the group is gone afterwards."""
    env = SETTINGS | {"HOME": str(log.parent), **more}
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=env, start_new_session=True)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def atropos_server(log: Path) -> Iterator[str]:
    """atroposlib's own server on a free loopback port; gives its URL."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [str(atropos_python().with_name("run-api")), "--host", "127.0.0.1", "--port", str(port)]
    with running(command, log) as process:
        wait_until(lambda: process.poll() is not None or answers(f"{url}/info"), "atroposlib's server", START_TIMEOUT_S)
        assert process.poll() is None, f"atroposlib's server ended:\n{log.read_text()[-4000:]}"
        yield url
