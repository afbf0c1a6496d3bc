from pathlib import Path

import pytest
from stepwell.common.own_process import machine_memory, usable_memory

GIB = 2**30


def own(folder: Path, line: str) -> Path:
    (folder / "own").write_text(f"{line}\n")
    return folder / "own"


def limit(group: Path, name: str, value: object) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / name).write_text(f"{value}\n")


@pytest.mark.parametrize(
    ("line", "root", "name"),
    [("0::/pods/one", "", "memory.max"), ("7:cpu,memory:/pods/one", "memory", "memory.limit_in_bytes")],
    ids=["v2", "v1"],
)
def test_the_smallest_limit_of_the_own_group_and_those_above_counts(
    tmp_path: Path, line: str, root: str, name: str
) -> None:
    limit(tmp_path / root / "pods" / "one", name, 6 * GIB)
    limit(tmp_path / root / "pods", name, 4 * GIB)
    limit(tmp_path / root, name, 9 * GIB)
    limit(tmp_path / root / "pods" / "other", name, GIB)
    assert usable_memory(64 * GIB, tmp_path, own(tmp_path, line)) == 4 * GIB
    assert usable_memory(2 * GIB, tmp_path, own(tmp_path, line)) == 2 * GIB


def test_in_a_container_that_names_its_group_by_the_hosts_path_the_root_counts(tmp_path: Path) -> None:
    limit(tmp_path, "memory.max", 3 * GIB)
    assert usable_memory(64 * GIB, tmp_path, own(tmp_path, "0::/kubepods/pod1/abc")) == 3 * GIB


def test_without_a_limit_the_machine_counts(tmp_path: Path) -> None:
    limit(tmp_path, "memory.max", "max")
    assert usable_memory(64 * GIB, tmp_path, own(tmp_path, "0::/")) == 64 * GIB
    assert usable_memory(64 * GIB, tmp_path, tmp_path / "nothing") == 64 * GIB


def test_this_machine_has_memory() -> None:
    assert 0 < usable_memory(machine_memory()) <= machine_memory()
