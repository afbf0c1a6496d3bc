from importlib import metadata
from pathlib import Path

import pytest

from stepwell.doctor import machine_checks as machine
from stepwell.doctor.findings import Grade


def test_installed_versions_are_listed() -> None:
    finding = machine.packages()
    assert finding.grade is Grade.OK
    assert f"stepwell {metadata.version('stepwell')}" in finding.what


def test_a_package_that_is_too_old_or_missing_is_a_fault() -> None:
    def version(name: str) -> str:
        if name == "aiohttp":
            raise metadata.PackageNotFoundError
        return "0.0.1" if name == "numpy" else metadata.version(name)

    finding = machine.packages(version)
    assert finding.grade is Grade.FAULT
    assert "aiohttp>=3.10 is required, none is installed" in finding.what
    assert "numpy>=2 is required, 0.0.1 is installed" in finding.what


@pytest.mark.parametrize(
    ("given", "grade", "words"),
    [
        ("", Grade.OK, "would be open"),
        ("short", Grade.FAULT, "16"),
        ("a-long-enough-control-key,and-another-one-of-them", Grade.OK, "in STEPWELL_GATEWAY_CONTROL_KEYS"),
    ],
)
def test_control_keys_are_read_as_a_gateway_reads_them(given: str, grade: Grade, words: str) -> None:
    finding = machine.control_keys(given)
    assert (finding.grade, words in finding.what) == (grade, True)


def test_a_folder_is_tested_with_a_commit_and_not_changed(tmp_path: Path) -> None:
    assert "a commit takes" in machine.disk(tmp_path).what
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_to_is_a_warning(tmp_path: Path) -> None:
    finding = machine.disk(tmp_path / "none")
    assert finding.grade is Grade.WARNING
    assert "cannot hold a journal" in finding.what
