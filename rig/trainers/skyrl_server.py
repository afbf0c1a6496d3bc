"""SkyRL's Tinker server with its JAX backend on a CPU, for tests: in its own environment and its own process group."""

import contextlib
import hashlib
import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rig.trainers.process import trainer_python
from stepwell.common.listening import free_port
from stepwell.common.processes import dying_with_this_process, end_group, kill_group, last_lines

START_TIMEOUT = 600.0
STOP_TIMEOUT = 15.0
SHOWN = 30
"""Lines of the log in an error text."""


@dataclass(frozen=True, slots=True)
class SkyrlServer:
    url: str
    log: Path
    process: "subprocess.Popen[bytes]"

    def kill(self) -> None:
        """With all its processes, as the kernel would."""
        kill_group(self.process)
        self.process.wait()


@contextlib.contextmanager
def start_skyrl(
    model: Path, folder: Path, *, adapters: int = 8, rank: int = 8, rows: int = 64
) -> Iterator[SkyrlServer]:
    """Serves a model folder until the block ends. `rows` go through the model at once. In the folder of a server before
    it, it has the states that this one has saved.

    The server is started by `uv run`: it reads its parent's command to start its engine in the same way.
    """
    python, port = trainer_python("skyrl"), free_port("127.0.0.1")
    folder.mkdir(parents=True, exist_ok=True)
    backend = {"max_lora_adapters": adapters, "max_lora_rank": rank, "train_micro_batch_size": rows}
    command = (
        *(str(python.parent / "uv"), "run", "--no-project", "--python", str(python), "-m", "skyrl.tinker.api"),
        *("--base-model", str(model), "--backend", "jax", "--backend-config", json.dumps(backend)),
        *("--host", "127.0.0.1", "--port", str(port), "--database-url", f"sqlite:///{folder / 'skyrl.db'}"),
        *("--checkpoints-base", str(folder / "checkpoints")),
    )
    settings = {
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "JAX_PLATFORMS": "cpu",
        "UV_OFFLINE": "1",
        "UV_CACHE_DIR": str(folder / "uv"),
        "HF_HUB_OFFLINE": "1",
        "JAX_COMPILATION_CACHE_DIR": str(python.parents[2] / f"jax-{_cpu()}"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    }
    log = folder / "skyrl.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            dying_with_this_process(command),
            cwd=folder,
            env={**os.environ, **settings},
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    server = SkyrlServer(f"http://127.0.0.1:{port}", log, process)
    try:
        _wait(server)
        yield server
    finally:
        end_group(process, timeout=STOP_TIMEOUT)


def _cpu() -> str:
    """What JAX compiles is machine code, which another CPU may not be able to run."""
    flags = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Features"))]
    return hashlib.sha256("".join(flags[:1]).encode()).hexdigest()[:8]


def _wait(server: SkyrlServer) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while not _is_healthy(server.url):
        assert server.process.poll() is None, last_lines(server.log, SHOWN)
        assert time.monotonic() < deadline, last_lines(server.log, SHOWN)
        time.sleep(0.25)


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/api/v1/healthz", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False
