"""sdist and wheel: what is in them, what they say of themselves, and that the wheel's code is what runs.

tests/e2e/test_wheel.py installs the wheel with its dependencies, on every Python that is named here.
"""

import email
import hashlib
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from tests.publishing.tools import complaints

CHECKOUT = Path(__file__).parents[2]
sys.path.insert(0, str(CHECKOUT / "scripts"))

from release import build, notes, with_addresses  # noqa: E402 - from scripts/

PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
HOME = "https://forge.example/stepwell/stepwell"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build(folder)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def sdist(dist: Path) -> Path:
    (path,) = dist.glob("*.tar.gz")
    return path


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as files:
        return email.message_from_bytes(files.read(f"{stem()}.dist-info/METADATA"))


def stem() -> str:
    return f"stepwell-{PROJECT['version']}"


def tracked(folder: str = ".") -> set[str]:
    listed = subprocess.run(["git", "ls-files", "-z", folder], cwd=CHECKOUT, check=True, capture_output=True, text=True)
    return {name for name in listed.stdout.split("\0") if name and (CHECKOUT / name).is_file()}


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        names = {name for name in files.namelist() if not name.startswith(f"{stem()}.dist-info/")}
    assert names == {name.removeprefix("src/") for name in tracked("src")}
    assert {"stepwell/py.typed", "stepwell/dashboard/page/index.html"} <= names


def test_the_sdist_has_tracked_files_only(sdist: Path) -> None:
    with tarfile.open(sdist) as files:
        names = {member.name.partition("/")[2] for member in files.getmembers() if member.isfile()}
    assert names - tracked() == {"PKG-INFO"}
    assert tracked("src") | {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff"} <= names


def test_two_builds_are_the_same_bytes(dist: Path, tmp_path: Path) -> None:
    build(tmp_path)
    assert hashes(tmp_path) == hashes(dist)


def test_the_metadata_says_what_pyproject_says(metadata: Message) -> None:
    assert metadata["Name"] == "stepwell"
    assert metadata["Version"] == PROJECT["version"]
    assert metadata["Requires-Python"] == PROJECT["requires-python"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_all("License-File") == PROJECT["license-files"]
    assert set(metadata.get_all("Provides-Extra", ())) == PROJECT["optional-dependencies"].keys()
    needed = [Requirement(line) for line in metadata.get_all("Requires-Dist", ())]
    always = {requirement.name for requirement in needed if "extra" not in str(requirement.marker)}
    assert always == {Requirement(line).name for line in PROJECT["dependencies"]}


def test_every_licence_of_what_is_included_is_named(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        included = [name for name in files.namelist() if name.startswith("stepwell/") and name.endswith("/LICENSE")]
    assert {f"src/{name}" for name in included} | {"LICENSE"} == set(PROJECT["license-files"])


def test_what_is_unpacked_from_the_wheel_runs(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        files.extractall(tmp_path)
    program = "import stepwell.cli; print(stepwell.__file__); stepwell.cli.main(['--version'])"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [str(tmp_path / "stepwell" / "__init__.py"), f"stepwell {PROJECT['version']}"]


def test_relative_links_of_the_readme_become_addresses_of_the_release() -> None:
    text = "[docs](docs/start.md#x) ![a [b]](docs/a.svg) [site](https://example.org) [here](#one) `[i](j)`"
    made = with_addresses(text, HOME, "v1.0.0")
    assert f"[docs]({HOME}/blob/v1.0.0/docs/start.md#x)" in made
    assert f"![a [b]]({HOME}/raw/v1.0.0/docs/a.svg)" in made
    assert "[site](https://example.org) [here](#one)" in made


def test_a_release_needs_its_tag_its_address_and_its_section() -> None:
    ready = {"version": "1.2.0", "urls": {"Repository": HOME}}
    changelog = "# Changes\n\n## Unreleased\n\n## 1.2.0 (2026-12-01)\n\n- More.\n\n## 1.1.0\n\n- Less.\n"
    assert notes("v1.2.0", ready, changelog) == "- More.\n"
    with pytest.raises(SystemExit, match="v1.2.1 is not v1.2.0"):
        notes("v1.2.1", ready, changelog)
    with pytest.raises(SystemExit, match="Repository"):
        notes("v1.2.0", {"version": "1.2.0"}, changelog)
    with pytest.raises(SystemExit, match="no section '## 1.2.0'"):
        notes("v1.2.0", ready, changelog.replace("- More.", ""))


def test_the_citation_fits_its_schema_and_names_the_same_authors() -> None:
    citation = CHECKOUT / "CITATION.cff"
    assert complaints("check-jsonschema", "--builtin-schema=vendor.citation-file-format", citation) == ""
    named = yaml.safe_load(citation.read_text())["authors"]
    assert [author["name"] for author in named] == [author["name"] for author in PROJECT["authors"]]
