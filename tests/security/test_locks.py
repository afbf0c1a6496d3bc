"""locks/: what is installed in the container and in CI is what was locked, file by file."""

import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

CHECKOUT = Path(__file__).parents[2]
sys.path.insert(0, str(CHECKOUT / "scripts"))

from lock import LOCKS  # noqa: E402 - from scripts/

PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
LINUX = {"sys_platform": "linux", "python_version": "3.11", "extra": ""}
WITHOUT = {"torch"}
"""CI uses its builds for CPUs, which have hashes of their own."""


@cache
def entries(name: str) -> dict[str, tuple[Version, int]]:
    """Of each package: the version, and how many hashes are listed."""
    text = (CHECKOUT / "locks" / f"{name}.txt").read_text()
    found: dict[str, tuple[Version, int]] = {}
    for entry in re.split(r"\n(?=\S)", text.strip()):
        match = re.match(r"([A-Za-z0-9._-]+)==(\S+)", entry)
        assert match, entry
        found[canonicalize_name(match[1])] = (
            Version(match[2]),
            len(re.findall(r"--hash=sha256:[0-9a-f]{64}\b", entry)),
        )
    return found


def wanted(extras: set[str]) -> Iterator[Requirement]:
    """The requirements of the project with these extras, and of extras that they name."""
    optional = PROJECT["optional-dependencies"]
    texts = [*PROJECT["dependencies"], *(text for extra in extras for text in optional[extra])]
    for requirement in map(Requirement, texts):
        if requirement.name == "stepwell":
            yield from wanted(requirement.extras)
        elif requirement.marker is None or requirement.marker.evaluate(LINUX):
            yield requirement


@pytest.mark.parametrize("name", LOCKS)
def test_every_package_has_hashes(name: str) -> None:
    assert entries(name)
    assert {package for package, (_, hashes) in entries(name).items() if not hashes} == set()


@pytest.mark.parametrize("name", [name for name, lock in LOCKS.items() if lock.has_project])
def test_every_dependency_is_locked_in_a_version_that_fits(name: str) -> None:
    """If it fails: just lock."""
    for requirement in wanted(set(LOCKS[name].extras)):
        package = canonicalize_name(requirement.name)
        if package not in WITHOUT:
            assert package in entries(name), f"{package} is not in locks/{name}.txt: run `just lock`"
            assert requirement.specifier.contains(entries(name)[package][0], prereleases=True), requirement
    assert not WITHOUT & entries(name).keys()


@pytest.mark.parametrize("name", LOCKS)
def test_no_address_is_in_a_lock(name: str) -> None:
    text = (CHECKOUT / "locks" / f"{name}.txt").read_text()
    assert not re.search(r"://|^\s*--(?!hash)|@", text, re.M)


def test_both_locks_have_the_same_ray() -> None:
    """A gateway of one version cannot join a cluster of another."""
    assert entries("container")["ray"] == entries("ci")["ray"]


def test_the_image_and_ci_install_nothing_else() -> None:
    dockerfile = (CHECKOUT / "deploy" / "Dockerfile").read_text().replace("\\\n", "")
    installs = re.findall(r"pip install ([^&\n]*)", dockerfile)
    assert len(installs) == 3
    for flags in installs:
        assert "--no-deps" in flags
        assert "--require-hashes" in flags or flags.endswith("--no-build-isolation --prefix=/install .")
    build = (CHECKOUT / "scripts" / "dev_env.py").read_text().split("def build(")[1].split("\ndef ")[0]
    assert re.findall(r"    pip\((.*?)[,)]", build) == ["TORCH", '"--no-deps"']
    assert '"--require-hashes"' in build
