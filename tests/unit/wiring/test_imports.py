"""What each process imports, and what it must not: every module is memory in each worker, and time at each start."""

import subprocess
import sys

import pytest

ROOMS = ("agents", "demo", "doctor", "envs", "exports", "trainers", "up")
HEAVY = (
    "datasets",
    "grpc",
    "httpx",
    "huggingface_hub",
    "pandas",
    "pyarrow",
    "ray",
    "tokenizers",
    "torch",
    "transformers",
)
SERVING = ("aiohttp", "fastapi", "starlette", "uvicorn")
POOL_INSIDE = ("pool.shard.actor", "pool.shard.journal", "pool.state")

ABSENT = {
    "gateway_server": ("dashboard", "rewards.runner", "rewards.confinement", *POOL_INSIDE),
    "gateway": ("atropos", "dashboard", "engines", "gateway", "rewards", *POOL_INSIDE),
    "pool": ("atropos", "dashboard", "engines", "gateway", "rewards"),
    "atropos": ("dashboard", "engines", "gateway", "rewards", *POOL_INSIDE),
    "dashboard": ("atropos", "gateway", "rewards", *POOL_INSIDE),
    "rewards": ("atropos", "dashboard", "engines", "gateway", *POOL_INSIDE),
    "session_keys": ("atropos", "dashboard", "engines", "gateway", "pool.client", "rewards", *POOL_INSIDE),
}
"""By module of wiring: rooms and parts of them, beside ROOMS."""
NOT_SERVING = ("gateway", "pool", "session_keys")
"""Those that answer no HTTP: the process that keeps a gateway's workers running does not either."""


def imported(module: str) -> set[str]:
    script = f"import stepwell.cli, stepwell.wiring.{module}, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("module", ABSENT)
def test_a_process_imports_only_what_it_uses(module: str) -> None:
    unwanted = {*HEAVY, *(f"stepwell.{part}" for part in (*ROOMS, *ABSENT[module]))}
    unwanted |= set(SERVING if module in NOT_SERVING else ())
    assert imported(module) & unwanted == set()
