"""A Harbor environment without Docker: a folder as the root, confined by bubblewrap.

    harbor run -p TASK -a AGENT -e local_sandbox:LocalSandbox

- A command sees its own folder, which it may write, and the machine's /usr, read-only. It sees no other file of the
  machine but a few of /etc, and no process outside.
- The task's Dockerfile is not built: what a task needs must be in the machine's /usr, or be installed below its folder.
- Every command runs as the same user.
- There is no network, except with `network=True` the machine's, for tasks that do not forbid one.
- A link that leads out of the folder is not followed from outside.
"""

import asyncio
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities

FOLDERS = ("app", "tmp", "root", "logs/agent", "logs/verifier", "logs/artifacts", "tests", "solution", "etc", "var/tmp")
LINKS = ("bin", "lib", "lib64", "sbin")
ETC = (
    *("alternatives", "ca-certificates", "group", "hosts", "ld.so.cache", "localtime", "nsswitch.conf", "passwd"),
    *("resolv.conf", "ssl"),
)
WORK_FOLDER = "/app"
SHELL = "/usr/bin/bash"
"""The machine's, which nothing inside can replace."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NO_NETWORK = (
    "the task asks for a network and LocalSandbox has none: give it the machine's by the kwargs of its environment, "
    '{"import_path": "local_sandbox:LocalSandbox", "kwargs": {"network": true}}, or name a Docker environment'
)


class LeadsOutside(PermissionError):
    """A path of the sandbox that is a link to something outside."""


class LocalSandbox(BaseEnvironment):  # type: ignore[misc]  # harbor has no types here
    _root: Path | None = None

    def __init__(self, *args: Any, network: bool = False, **kwargs: Any) -> None:
        self._shares_network = network
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        return "stepwell-local"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        if shutil.which("bwrap") is None:
            raise FileNotFoundError("bubblewrap is not installed: apt-get install bubblewrap")

    @property
    def root(self) -> Path:
        if self._root is None:
            raise RuntimeError("the sandbox is not started")
        return self._root

    async def start(self, force_build: bool) -> None:
        """RuntimeError if the task says itself that it needs a network and there is none: its reward would be wrong."""
        asks = "network_mode" in self.task_env_config.model_fields_set and not self._network_disabled
        if asks and not self._shares_network:
            raise RuntimeError(NO_NETWORK)
        self._root = _new_root((*FOLDERS, self._work_folder().lstrip("/")))

    async def stop(self, delete: bool) -> None:
        if delete and self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        target = self._outside_path(target_path)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source_path, target)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        shutil.copytree(source_dir, self._outside_path(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(self._outside_path(source_path), target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        shutil.copytree(self._outside_path(source_dir), target_dir, dirs_exist_ok=True, ignore=_not_plain)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """TimeoutError if it takes longer; then nothing of it runs any more."""
        variables = {"PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8", **(self._merge_env(env) or {})}
        words = [*self._bubblewrap(cwd or self._work_folder(), variables), SHELL, "-c", command]
        pipes: dict[str, Any] = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
        process = await asyncio.create_subprocess_exec(
            *words, stdin=asyncio.subprocess.DEVNULL, env={"PATH": PATH}, start_new_session=True, **pipes
        )
        try:
            stdout, stderr = await asyncio.wait_for(process.communicate(), timeout_sec)
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        return ExecResult(
            stdout=stdout.decode(errors="replace"),
            stderr=stderr.decode(errors="replace"),
            return_code=process.returncode,
        )

    def _work_folder(self) -> str:
        return str(getattr(self.task_env_config, "workdir", None) or WORK_FOLDER)

    def _bubblewrap(self, cwd: str, variables: dict[str, str]) -> list[str]:
        who = ["--cap-drop", "ALL"] if os.geteuid() == 0 else ["--unshare-user", "--uid", "0", "--gid", "0"]
        return [
            *("bwrap", "--die-with-parent", "--new-session", "--unshare-pid", "--unshare-ipc", "--unshare-uts"),
            *(["--unshare-net"] if self._network_disabled or not self._shares_network else []),
            *who,
            *("--bind", str(self.root), "/", "--ro-bind", "/usr", "/usr"),
            *(word for name in ETC for word in ("--ro-bind-try", f"/etc/{name}", f"/etc/{name}")),
            *("--proc", "/proc", "--dev", "/dev", "--tmpfs", "/dev/shm", "--hostname", "sandbox"),
            "--clearenv",
            *(word for name, value in variables.items() for word in ("--setenv", name, value)),
            *("--chdir", cwd, "--"),
        ]

    def _outside_path(self, path: str) -> Path:
        """Where a path of the sandbox is on the machine."""
        found = (self.root / str(path).lstrip("/")).resolve()
        if not found.is_relative_to(self.root):
            raise LeadsOutside(f"{path} leads out of the sandbox")
        return found


def _new_root(folders: tuple[str, ...]) -> Path:
    root = Path(tempfile.mkdtemp(prefix="harbor-sandbox-")).resolve()
    for folder in folders:
        (root / folder).mkdir(parents=True, exist_ok=True)
    for link in LINKS:
        (root / link).symlink_to(f"usr/{link}")
    return root


def _not_plain(folder: str, names: list[str]) -> list[str]:
    """The entries that are not copied out: links, pipes, devices."""
    paths = {name: Path(folder) / name for name in names}
    return [name for name, path in paths.items() if path.is_symlink() or not (path.is_file() or path.is_dir())]
