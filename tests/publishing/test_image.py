"""deploy/Dockerfile: linted, and built step by step in a clean file system, since tests have no container daemon."""

import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from rig.clean_root import make_clean_root
from rig.gateways import free_port
from rig.image_build import Image, build_context, build_image, instructions
from tests.publishing.tools import complaints

CHECKOUT = Path(__file__).parents[2]
DEPLOY = CHECKOUT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
IGNORED = (DEPLOY / "Dockerfile.dockerignore").read_text()
VERSION = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["version"]
USER = "10001"
EXTRAS = "import math_verify, opentelemetry.sdk, psycopg, pyarrow, stepwell.gateway.app, stepwell.rewards.worker"
SERVE = """
set -e
ray start --head --num-cpus=1 --include-dashboard=false --port=$RAY_PORT > /tmp/ray.log
stepwell pool --ray-address 127.0.0.1:$RAY_PORT --journal /var/lib/stepwell/journal
stepwell dashboard --ray-address 127.0.0.1:$RAY_PORT --port $PORT > /tmp/dashboard.log 2>&1 &
for second in $(seq 120); do
  if %s; then echo healthy; exit; fi
  sleep 1
done
cat /tmp/dashboard.log
exit 1
"""


def test_a_linter_finds_nothing_in_the_dockerfile() -> None:
    assert complaints("hadolint", "--no-color", DEPLOY / "Dockerfile") == ""


def test_compose_fits_its_schema() -> None:
    assert complaints("check-jsonschema", "--builtin-schema=vendor.compose-spec", DEPLOY / "compose.yaml") == ""


def test_what_the_build_copies_is_in_its_context(tmp_path: Path) -> None:
    context = build_context(CHECKOUT, IGNORED, tmp_path)
    copies = [step for step in instructions(DOCKERFILE) if step.name == "COPY" and "from" not in step.flags]
    assert len(copies) == 4
    for step in copies:
        assert all((context / source).exists() for source in step.rest.split()[:-1]), step
    there = {path.relative_to(context).parts[0] for path in context.iterdir()}
    assert there == {"LICENSE", "README.md", "deploy", "locks", "pyproject.toml", "src"}
    assert not list(context.rglob("__pycache__"))


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    work = tmp_path_factory.mktemp("image")
    work.chmod(0o755)
    make_clean_root(work / "base")
    context = build_context(CHECKOUT, IGNORED, work / "context")
    yield build_image(DOCKERFILE, context, work / "base", work)
    shutil.rmtree(work)  # more than a gigabyte


@pytest.mark.nightly
def test_the_image_is_built_and_says_what_it_is(image: Image) -> None:
    assert image.run().startswith("usage: stepwell COMMAND")
    assert image.run("stepwell", "--version") == f"stepwell {VERSION}\n"
    assert image.run("python", "-c", EXTRAS) == ""


@pytest.mark.nightly
def test_the_image_contains_what_runs_and_no_more(image: Image) -> None:
    packages = set(image.run("python", "-m", "pip", "list", "--format=freeze").split())
    names = {line.partition("==")[0] for line in packages}
    assert "ray" in names
    assert not names & {"torch", "vllm", "hatchling", "editables", "pytest"}
    for program in ("bwrap", "tini", "wget", "join-ray", "ray"):
        assert image.run("sh", "-c", f"command -v {program}").startswith("/")
    assert image.run("sh", "-c", "ls /build 2>/dev/null || true") == ""


@pytest.mark.nightly
def test_its_user_writes_its_data_and_not_its_code(image: Image) -> None:
    assert image.run("id", "-u") == f"{USER}\n"
    image.run("sh", "-c", "touch /var/lib/stepwell/a /var/spool/stepwell/a ~/a && rm /var/lib/stepwell/a")
    image.run("sh", "-c", "! touch /usr/local/lib/a 2>/dev/null && ! touch /etc/a 2>/dev/null")


@pytest.mark.nightly
def test_a_pool_and_a_dashboard_run_in_it_and_are_healthy(image: Image) -> None:
    port = free_port()
    asked = f"sh -c '{image.health[2]}'"
    settings = {"PORT": str(port), "RAY_PORT": str(free_port()), "HOME": "/home/stepwell"}
    shown = image.run("sh", "-c", SERVE % asked, HEALTH_URL=f"http://127.0.0.1:{port}/health", **settings)
    assert shown.endswith("healthy\n"), shown
