"""The wheel, installed with its dependencies into an empty environment, on every Python that pyproject.toml names."""

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from rig.pythons import find_python
from rig.shells import Shell, fresh_shell
from rig.vllm_server import VllmServer
from stepwell.commands import COMMANDS
from tests.e2e.readme_path import follow, installation

CHECKOUT = Path(__file__).parents[2]
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
PYTHONS = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line]
EXTRAS = ("arrow", "envs", "oidc", "otel", "postgres", "rewards")
"""Those that need no torch."""
PATIENCE = 3_600.0
IMPORT_ALL = """
# foreign/child has programs that run in the environments of others
import importlib, pkgutil, stepwell

left_out = {"torch", "safetensors", "matplotlib", "wandb", "vllm", "verl", "tensordict", "transfer_queue"}
for module in pkgutil.walk_packages(stepwell.__path__, "stepwell."):
    try:
        if not module.name.endswith("__main__") and ".foreign.child." not in module.name:
            importlib.import_module(module.name)
    except ModuleNotFoundError as missing:
        assert (missing.name or "").partition(".")[0] in left_out, (module.name, missing.name)
print("all imported")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, CHECKOUT / "scripts" / "release.py", "build", folder], check=True)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(params=PYTHONS)
def clean(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shell]:
    """An environment with nothing installed; only pip's cache is shared."""
    venv, work = tmp_path / "venv", tmp_path / "work"
    work.mkdir()
    subprocess.run([find_python(request.param), "-m", "venv", str(venv)], check=True)
    cache = subprocess.run([sys.executable, "-m", "pip", "cache", "dir"], check=True, capture_output=True, text=True)
    pip = {"PIP_CACHE_DIR": cache.stdout.strip(), "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_QUIET": "1"}
    with fresh_shell(work, **pip, PATH=f"{venv / 'bin'}:/usr/bin:/bin") as shell:
        yield shell


@pytest.mark.nightly
def test_the_wheel_works_in_an_empty_environment(clean: Shell, wheel: Path, vllm: VllmServer) -> None:
    clean.run("bash", "-ec", installation().replace("pip install .", f"pip install {wheel}"), timeout=PATIENCE)

    assert clean.run("stepwell", "--version") == f"stepwell {PROJECT['version']}\n"
    assert all(f"  {command} " in clean.run("stepwell", "--help") for command in COMMANDS)
    for command in COMMANDS:
        assert clean.run("stepwell", *command.split(), "--help").startswith(f"usage: stepwell {command}")
    clean.run("pip", "install", "anthropic", timeout=PATIENCE)
    follow(clean, vllm.url)

    clean.run("pip", "install", f"{wheel}[{','.join(EXTRAS)}]", timeout=PATIENCE)
    clean.run("pip", "check")
    assert clean.run("python", "-W", "error::SyntaxWarning", "-c", IMPORT_ALL).endswith("all imported\n")
