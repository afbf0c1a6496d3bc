"""Other people's gateways, as they are published, each in an environment of its own.

rllm-model-gateway keeps its traces in SQLite, which is its default. litellm is asked for nothing but to pass calls on:
it has no record of tokens to keep.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.gateway_rig import canned
from benchmarks.gateway_rig.processes import Server, serving
from benchmarks.gateway_rig.subjects import Plain, Rllm, Subject

CHECKOUT = Path(__file__).resolve().parents[2]
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "LITELLM_TELEMETRY": "False"}


@contextmanager
def peer_subjects(engine: Server, folder: Path) -> Iterator[list[Subject]]:
    rllm, litellm = peer_pythons()
    here = ["--host", "127.0.0.1", "--port", "{port}"]
    store = ["--store", "sqlite", "--db-path", str(folder / "traces.sqlite"), "--log-level", "warning"]
    to_engine = ["--worker", f"{engine.url}/v1"]
    config = ["--config", str(litellm_config(engine, folder)), "--num_workers", "1"]
    with (
        serving([rllm, "-m", "rllm_model_gateway", *here, *store, *to_engine], folder / "rllm.log") as first,
        serving(
            [litellm.with_name("litellm"), *here, *config],
            folder / "litellm.log",
            ready="/health/liveliness",
            env=OFFLINE,
        ) as second,
    ):
        yield [Rllm("rllm", first), Plain("litellm", second)]


def peer_pythons() -> list[Path]:
    script = CHECKOUT / "scripts" / "peer_envs.py"
    built = subprocess.run([sys.executable, script, "rllm", "litellm"], check=True, stdout=subprocess.PIPE, text=True)
    return [Path(line) for line in built.stdout.splitlines()]


def litellm_config(engine: Server, folder: Path) -> Path:
    upstream = {"model": f"openai/{canned.MODEL}", "api_base": f"{engine.url}/v1", "api_key": "not-needed"}
    config = {"model_list": [{"model_name": canned.MODEL, "litellm_params": upstream}]}
    path = folder / "litellm.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    return path
