"""The real vLLM, for tests: started on the tiny model, in its own environment and its own process group.

    python -m rig.vllm_server

makes a model, starts vLLM on it, prints its address and waits for Ctrl-C.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rig.tiny_model import make_tiny_model
from stepwell.demo import engine
from stepwell.engines.vllm_control import ADDITIONS, base_flags

MODEL_NAME = "tiny"
FIRST_ANSWER = 300.0
CHECKOUT = Path(__file__).parents[1]
EXTENSIONS = (Path(__file__).parent / "vllm_extension", engine.EXTENSION)

FLAGS = (
    *("--served-model-name", MODEL_NAME),
    *("--max-model-len", "2048", "--enforce-eager"),
    *base_flags("hermes"),
    *ADDITIONS["CPU"],
    *("--worker-extension-cls", "stepwell_take_time.TakeTime"),  # instead of the one above, whose subclass it is
    *("--distributed-executor-backend", "uni"),  # the engine's core has a process of its own, the one worker has none
)
ENVIRONMENT = {**engine.ENVIRONMENT, "PYTHONPATH": os.pathsep.join(map(str, EXTENSIONS))}


@dataclass(frozen=True, slots=True)
class VllmServer:
    """A vLLM that answers; alive as long as the `start_vllm` it came from is open."""

    url: str
    pid: int
    log: Path
    model_name: str = MODEL_NAME


@contextlib.contextmanager
def start_vllm(
    model: Path,
    *,
    log: Path,
    dtype: str = "float32",
    flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[VllmServer]:
    """Serve a model folder until the block ends; whatever vLLM started is gone afterwards.

    `flags` and `environment` come on top.
    """
    given = (*FLAGS, "--dtype", dtype, *flags)
    variables = {**ENVIRONMENT, **(environment or {})}
    with engine.start_engine(model, python=vllm_python(), log=log, flags=given, environment=variables) as started:
        started.wait()
        _answer_once(started.url)
        yield VllmServer(url=started.url, pid=started.process.pid, log=log)


def _answer_once(url: str) -> None:
    """Its first answer takes seconds, and longer on a busy machine than a gateway waits for one."""
    body = json.dumps({"model": MODEL_NAME, "prompt": "a", "max_tokens": 1}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with contextlib.suppress(urllib.error.HTTPError):  # a classifier completes nothing
        urllib.request.urlopen(request, timeout=FIRST_ANSWER).close()


def vllm_python() -> Path:
    """The interpreter of vLLM's environment, which is built first where it is missing."""
    script = CHECKOUT / "scripts" / "vllm_env.py"
    built = subprocess.run([sys.executable, script], check=True, stdout=subprocess.PIPE, text=True)
    return Path(built.stdout.splitlines()[-1])


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
