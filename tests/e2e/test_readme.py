"""The README's five-minute start, from the wheel in a fresh environment; its dependencies are those of the tests.

tests/e2e/test_wheel.py also installs the dependencies, on every Python.
"""

import subprocess
import sys
from pathlib import Path

from rig.shells import fresh_shell
from rig.vllm_server import VllmServer
from tests.e2e.readme_path import follow

CHECKOUT = Path(__file__).parents[2]


def make_environment(folder: Path) -> Path:
    """A fresh environment with the wheel; returns its folder of programs."""
    subprocess.run([sys.executable, CHECKOUT / "scripts" / "release.py", "build", folder / "dist"], check=True)
    (wheel,) = (folder / "dist").glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", wheel], check=True)
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    ours = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "dependencies.pth").write_text("\n".join(ours))  # they come after the wheel's own folder
    return python.parent


def test_the_five_minute_start_works_twice_and_plain_clients_are_recorded(vllm: VllmServer, tmp_path: Path) -> None:
    programs, work = make_environment(tmp_path), tmp_path / "work"
    work.mkdir()
    with fresh_shell(work, PATH=f"{programs}:/usr/bin:/bin") as shell:
        where = shell.run("python", "-c", "import stepwell; print(stepwell.__file__)")
        assert where.startswith(str(programs.parent)), where
        follow(shell, vllm.url)
