"""What each process imports, and what it must not: every module is memory in each worker, and time at each start."""

import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from stepwell.commands import COMMANDS

PACKAGES = ("agents", "demo", "doctor", "envs", "exports", "trainers")
UP = ("launch_plan", "processes", "up")
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
POOL_INSIDE = ("pool.actors", "pool.shard.journal", "pool.rules.pool")
"""A slice has its operations and its state in one file, so that who asks for something loads `pool.state`."""

SERVES_AGENTS = ("gateway.gateway_app", "gateway._sampling", "gateway._rules", "gateway._redactor", "sections.serve")
KEEPS_WORKERS = ("gateway.run_gateway", "gateway._run_workers", "gateway._link", "sections.network_link")
ABSENT = {
    SERVES_AGENTS: ("dashboard", "rewards.runner", "rewards.confinement", *POOL_INSIDE),
    KEEPS_WORKERS: ("atropos", "dashboard", "engines", "gateway", "rewards", *POOL_INSIDE),
    ("pool.run_pool", "pool._keep_pool"): ("atropos", "dashboard", "engines", "gateway", "rewards"),
    ("atropos.atropos_app", "sections.join_pool", "sections.serve"): (
        "dashboard",
        "engines",
        "gateway",
        "rewards",
        *POOL_INSIDE,
    ),
    ("dashboard.run_dashboard", "sections.join_pool", "sections.serve"): (
        "atropos",
        "gateway",
        "rewards",
        *POOL_INSIDE,
    ),
    ("rewards.run_try", "rewards.run_rescore", "rewards._job"): (
        "atropos",
        "dashboard",
        "engines",
        "gateway",
        *POOL_INSIDE,
    ),
    ("keys.run_gateway_key",): ("atropos", "dashboard", "engines", "gateway", "pool.client", "rewards", *POOL_INSIDE),
}
"""By the functions that a process runs: packages and parts of them that it does not import, beside PACKAGES and UP."""
NOT_SERVING = (KEEPS_WORKERS, ("pool.run_pool", "pool._keep_pool"), ("keys.run_gateway_key",))
"""Those that answer no HTTP: the process that keeps a gateway's workers running does not either."""


def imports_of(function: str) -> Iterator[str]:
    """The import of the module, and those inside the function."""
    module, _, name = function.partition(".")
    yield f"import stepwell.commands.{module}"
    spec = find_spec(f"stepwell.commands.{module}")
    assert spec is not None
    assert spec.origin is not None
    (found,) = (
        node
        for node in ast.parse(Path(spec.origin).read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
    )
    yield from (ast.unparse(node) for node in ast.walk(found) if isinstance(node, ast.Import | ast.ImportFrom))


def imported(lines: Sequence[str]) -> set[str]:
    script = "\n".join(("import stepwell.cli, sys", *lines, "print(*sys.modules)"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("process", ABSENT, ids=lambda process: process[0])
def test_a_process_imports_only_what_it_uses(process: Sequence[str]) -> None:
    unwanted = {*HEAVY, *(f"stepwell.{part}" for part in (*PACKAGES, *ABSENT[tuple(process)]))}
    unwanted |= {f"stepwell.commands.{part}" for part in UP}
    unwanted |= set(SERVING if process in NOT_SERVING else ())
    found = imported([line for function in process for line in imports_of(function)])
    assert "stepwell.commands" in found
    assert found & unwanted == set()


def test_help_of_a_command_imports_nothing_heavy_and_nothing_that_serves() -> None:
    modules = {function.partition(".")[0] for _, function in COMMANDS.values()}
    found = imported([f"import stepwell.commands.{module}" for module in sorted(modules)])
    assert found & {*HEAVY, "fastapi", "starlette", "uvicorn", "stepwell.gateway", "stepwell.trainers"} == set()
