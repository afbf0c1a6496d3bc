"""S1, S2: generated code runs at the level that was chosen or not at all, and everyone can see which level that is."""

import os
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rig.waiting import wait_until
from stepwell.commands.rewards import TrySettings
from stepwell.doctor import machine_checks
from stepwell.doctor.findings import Grade
from stepwell.errors import BadRequest, NotReady
from stepwell.rewards.builtin.python_tests import TestRun
from stepwell.rewards.confinement import sandbox
from stepwell.rewards.confinement import sandbox as bubblewrap
from stepwell.rewards.confinement.process import CgroupParent, find_parent
from stepwell.rewards.confinement.sandbox import Sandbox, SandboxLevel, open_sandbox
from stepwell.rewards.confinement.seccomp import ARCHITECTURES, filter_program
from stepwell.rewards.loading import load
from stepwell.rewards.runner.messages import Job

ADD = "def add(a, b): return a + b"


@pytest.fixture
def without_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> None:
    open_sandbox.cache_clear()
    monkeypatch.setattr(sandbox, "find_bubblewrap", lambda: None)


def test_strict_is_the_default_everywhere() -> None:
    assert Job(function="python_tests").sandbox is SandboxLevel.STRICT
    assert TrySettings.model_fields["sandbox"].default == "strict"


def test_without_bubblewrap_generated_code_does_not_run_and_the_error_says_what_to_do(without_bubblewrap: None) -> None:
    with pytest.raises(BadRequest, match="bwrap is not in the PATH; install bubblewrap"):
        load("python_tests")
    with pytest.raises(BadRequest, match="install bubblewrap"):
        load("weighted_sum", {"of": {"tests": {"function": "python_tests"}}})
    finding = machine_checks.sandbox()
    assert finding.grade is Grade.WARNING
    assert "install bubblewrap" in finding.what


def test_a_kernel_that_allows_no_namespaces_is_said(tmp_path: Path) -> None:
    refusing = tmp_path / "bwrap"
    refusing.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    refusing.chmod(0o755)
    with pytest.raises(NotReady, match="No permissions to create new namespace; let the worker make namespaces"):
        Sandbox(SandboxLevel.STRICT, str(refusing)).check()


def test_a_python_that_other_users_cannot_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    with pytest.raises(NotReady, match=r"must be able to read this Python: chmod -R o\+rX") as refused:
        Sandbox(SandboxLevel.STRICT, bubblewrap.find_bubblewrap()).check()
    assert "namespaces" not in str(refused.value)


@pytest.fixture(params=["temporary", "home"])
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder with a key in it."""
    if request.param == "temporary":
        assert tmp_path.is_relative_to(tempfile.gettempdir())
        yield _with_key(tmp_path / "project")
    else:
        with tempfile.TemporaryDirectory(prefix="stepwell-test-", dir=Path.home()) as folder:
            yield _with_key(Path(folder) / "project")


def _with_key(project: Path) -> Path:
    project.mkdir()
    (project / "key").write_text("sk-secret")
    (project.parent / "other").write_text("somebody else's")
    return project


@pytest.mark.parametrize("environment", [".venv", "."])
@pytest.mark.parametrize("linked", [False, True], ids=["plain", "linked"])
def test_a_python_in_a_home_or_temporary_folder_works_and_shows_nothing_beside_it(
    project: Path, environment: str, linked: bool
) -> None:
    python = _new_environment(project / environment, project / "versions" / "latest" if linked else None)
    code = (
        f"import os, sys\nproject = {str(project)!r}\n"
        "def python(): return sys.executable\n"
        "def files(): return [sorted(os.listdir(folder)) for folder in (project, os.path.dirname(project))]\n"
        "def strangers():\n    ways = (project, *sys.path)\n"
        "    return [n for n in os.listdir('/tmp') if not any(way.startswith('/tmp/' + n + '/') for way in ways)]\n"
        "def writes():\n    try: open(sys.executable + '.new', 'w')\n    except OSError: return False\n    return True"
    )
    inside = ["bin", "lib", "lib64", "pyvenv.cfg"] if environment == "." else [".venv"]
    expected = [[*inside, *(["versions"] if linked else [])], ["project"]]
    tests = (
        f"assert python() == {str(python)!r}\nassert files() == {expected!r}, files()\n"
        "assert strangers() == [], strangers()\nassert not writes()"
    )
    program = (
        "from stepwell.rewards.builtin.python_tests import TestRun\n"
        "from stepwell.rewards.confinement.sandbox import SandboxLevel, open_sandbox\n"
        f"run = TestRun(open_sandbox(SandboxLevel.STRICT), 60.0, 512)\n"
        f"print(run.why_failed({code!r}, {tests!r})[0] or 'passed')"
    )
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False, cwd=project)
    assert (done.stdout, done.stderr) == ("passed\n", "")


def _new_environment(folder: Path, link: Path | None) -> Path:
    """The Python of a virtual environment with this one's packages. With `link`, another link is between it and its
    file, as with pyenv and uv."""
    venv.EnvBuilder(symlinks=True).create(folder)
    (packages,) = folder.glob("lib/*/site-packages")
    (packages / "these.pth").write_text("\n".join(entry for entry in sys.path if Path(entry).is_dir()))
    python = folder / "bin" / "python"
    if link is not None:
        link.parent.mkdir()
        link.symlink_to(Path(sys.executable).resolve())
        python.unlink()
        python.symlink_to(link)
    return python


@pytest.mark.parametrize(("left_out", "hole"), [("--unshare-net", "network"), ("--unshare-pid", "other processes")])
def test_a_sandbox_with_a_hole_is_refused(left_out: str, hole: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = bubblewrap.bubblewrap_command

    def with_hole(*args: Any, **kwargs: Any) -> list[str]:
        return [part for part in whole(*args, **kwargs) if part != left_out]

    monkeypatch.setattr(sandbox, "bubblewrap_command", with_hole)
    with pytest.raises(NotReady, match=f"the sandbox does not hold: .*{hole}"):
        Sandbox(SandboxLevel.STRICT, bubblewrap.find_bubblewrap()).check()


def test_the_doctor_shows_the_level() -> None:
    finding = machine_checks.sandbox()
    assert finding.grade is Grade.OK
    assert "strict: in bubblewrap" in finding.what


def test_code_runs_with_the_workers_rights_only_if_somebody_chose_that(without_bubblewrap: None) -> None:
    function: Any = load("python_tests", sandbox=SandboxLevel.NONE)
    assert function is not None
    run = TestRun(open_sandbox(SandboxLevel.NONE), 30.0, 512)
    assert run.why_failed(ADD, "assert add(1, 2) == 3")[0] == ""
    assert run.why_failed("import os\ndef f(): return os.getuid()", f"assert f() == {os.getuid()}")[0] == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_runs_the_code_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3")  # the environment's own may be closed to other users
    run = TestRun(Sandbox(SandboxLevel.USER), 30.0, 512)
    code = (
        "import ctypes, os, time\n"
        "if os.fork() == 0:\n    os.setsid()\n    ctypes.CDLL(None).prctl(15, b'STEPWELL_SLEEPS', 0, 0, 0)\n"
        "    time.sleep(300)\ndef f(): return os.getuid()"
    )
    assert run.why_failed(code, "assert f() > 2**30")[0] == ""
    wait_until(lambda: sleeping() == 0, "what it left behind to be gone")


def test_nothing_survives_the_worker(tmp_path: Path) -> None:
    """A worker that is killed takes its sandboxes with it."""
    program = (
        "from stepwell.rewards.builtin.python_tests import TestRun\n"
        "from stepwell.rewards.confinement.sandbox import SandboxLevel, open_sandbox\n"
        "code = 'import ctypes, time\\nctypes.CDLL(None).prctl(15, b\"STEPWELL_SLEEPS\", 0, 0, 0)\\ntime.sleep(300)'\n"
        "TestRun(open_sandbox(SandboxLevel.STRICT), 300.0, 512).why_failed(code, 'pass')\n"
    )
    worker = subprocess.Popen([sys.executable, "-c", program])
    try:
        wait_until(lambda: sleeping() == 1, "the candidate to sleep")
    finally:
        worker.kill()
        worker.wait()
    wait_until(lambda: sleeping() == 0, "the candidate to be gone")


def sleeping() -> int:
    count = 0
    for comm in Path("/proc").glob("[0-9]*/comm"):
        try:
            count += comm.read_text().strip() == "STEPWELL_SLEEPS"
        except OSError:
            continue
    return count


def test_a_candidate_has_its_time_from_when_its_sandbox_is_ready() -> None:
    run = TestRun(open_sandbox(SandboxLevel.STRICT), 2.0, 512)
    began = time.monotonic()
    why, took = run.why_failed("import time; time.sleep(60)", "pass")
    assert why == "timed out"
    assert 2.0 <= took <= time.monotonic() - began


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_the_filter_ends_with_a_return_on_each_architecture(machine: str) -> None:
    program = filter_program(machine) or b""
    assert len(program) % 8 == 0
    assert program[-8] == 0x06
    assert filter_program("riscv64") is None


def test_control_groups_of_version_2_are_used_where_they_are_passed_on(tmp_path: Path) -> None:
    """A folder stands for the kernel's: the machines that run this test may have version 1 only."""
    own = tmp_path / "own"
    own.write_text("0::/service/worker\n")
    folder = tmp_path / "service" / "worker"
    folder.mkdir(parents=True)
    for place, passed_on in ((folder, ""), (folder.parent, "cpu memory pids")):
        (place / "cgroup.subtree_control").write_text(passed_on)
    parent = find_parent(tmp_path, own)
    assert parent == CgroupParent("v2", dict.fromkeys(("memory", "pids"), folder.parent))
    group = parent.make(100, 8)
    (made,) = group.folders
    assert (made / "memory.max").read_text() == str((100 + 64) * 2**20)
    assert (made / "pids.max").read_text() == "12"


def test_groups_that_a_killed_worker_left_are_removed() -> None:
    parent = find_parent()
    if parent is None:
        pytest.skip("this process may not make control groups")
    left = [folder / "stepwell-999999999-left" for folder in set(parent.folders.values())]
    for group in left:
        group.mkdir()
    find_parent()
    assert not any(group.exists() for group in left)


def test_no_control_groups_is_said() -> None:
    assert "limits for each process only" in Sandbox(SandboxLevel.STRICT).description
