"""The real vLLM, for tests: started on the tiny model, in its own environment and its own process group.

    python -m tests.rig.vllm_server

makes a model, starts vLLM on it, prints its address and waits for Ctrl-C.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.rig.tiny_model import make_tiny_model

MODEL_NAME = "tiny"
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 15.0
CHECKOUT = Path(__file__).parents[2]
EXTENSIONS = (Path(__file__).parent / "vllm_extension", CHECKOUT / "src/stepwell/demo/vllm_extension")

FLAGS = (
    *("--max-model-len", "2048", "--dtype", "float32", "--enforce-eager"),
    *("--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    *("--enable-scale-out", "--worker-extension-cls", "stepwell_take_time.TakeTime"),
)
SETTINGS = {
    "VLLM_SERVER_DEV_MODE": "1",  # /pause, /collective_rpc and their kin
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # cores are shared with the tests themselves
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "PYTHONPATH": os.pathsep.join(map(str, EXTENSIONS)),
}


@dataclass(frozen=True, slots=True)
class VllmServer:
    """A vLLM that answers; alive as long as the `start_vllm` it came from is open."""

    url: str
    pid: int
    log: Path
    model_name: str = MODEL_NAME


class VllmDidNotStartError(Exception):
    """Says what was waited for, and ends with the log's last lines."""


@contextlib.contextmanager
def start_vllm(model: Path, *, log: Path) -> Iterator[VllmServer]:
    """Serve a model folder until the block ends; whatever vLLM started is gone afterwards."""
    command, url = _command(model)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=_environment(), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _wait_until_healthy(process, url, log)
        yield VllmServer(url=url, pid=process.pid, log=log)
    finally:
        _end_group(process)


def vllm_python() -> Path:
    """The interpreter of vLLM's environment, which is built first where it is missing."""
    script = CHECKOUT / "scripts" / "vllm_env.py"
    built = subprocess.run([sys.executable, script], check=True, stdout=subprocess.PIPE, text=True)
    return Path(built.stdout.splitlines()[-1])


def _command(model: Path) -> tuple[list[str], str]:
    port = _free_port()
    served = ["--model", str(model), "--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", str(port)]
    command = [str(vllm_python()), "-m", "vllm.entrypoints.openai.api_server", *served, *FLAGS]
    return command, f"http://127.0.0.1:{port}"


def _environment() -> dict[str, str]:
    """Only what a fresh shell has, so that a developer's own settings of Python, Ray or vLLM do not leak in."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
    return kept | SETTINGS


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not _is_healthy(url):
        if process.poll() is not None:
            raise VllmDidNotStartError(f"vLLM ended with code {process.returncode} before it answered\n{_tail(log)}")
        if time.monotonic() > deadline:
            raise VllmDidNotStartError(f"waited {START_TIMEOUT_S:.0f} s for {url}/health to answer 200\n{_tail(log)}")
        time.sleep(0.25)


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-40:]
    return "\n".join([f"the last lines of {log}:", *lines])


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End the server and the processes it forked. Those can outlive it, so it is the group that is waited for."""
    for signal_, patience_s in ((signal.SIGTERM, STOP_TIMEOUT_S), (signal.SIGKILL, STOP_TIMEOUT_S)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal_)
        deadline = time.monotonic() + patience_s
        while _group_lives(process) and time.monotonic() < deadline:
            time.sleep(0.05)


def _group_lives(process: subprocess.Popen[bytes]) -> bool:
    process.poll()  # reaps the leader, which would count as living until then
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def main() -> None:
    for name in (signal.SIGINT, signal.SIGTERM):  # a shell starts background jobs with SIGINT ignored
        signal.signal(name, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt), tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "model")
        with start_vllm(model, log=Path(folder) / "vllm.log") as server:
            sys.stdout.write(f"vLLM serves {server.model_name!r} on {server.url} (log: {server.log}); Ctrl-C ends it\n")
            sys.stdout.flush()
            signal.pause()


if __name__ == "__main__":
    main()
