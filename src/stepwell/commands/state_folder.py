"""./.stepwell: what `stepwell up` keeps between two runs, and how `down` and `status` find the running one.

- Only its owner can read it. One that another user has made, can change or can read is refused, because a key that
  somebody else knows may be in it.
- The running `up` holds a lock, which the kernel releases in any case; so the record of a killed one is recognised.
- Signals go only to the process that wrote the record.
"""

import fcntl
import os
import secrets
import shlex
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from stepwell.common.files import read_own, replacing_file, why_folder_is_not_ours
from stepwell.errors import Conflict, Forbidden

NAME = ".stepwell"
KEY_BYTES, TOKEN_BYTES = 24, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The process that runs, and where `status` finds it."""

    pid: int
    started: int | None
    """When the kernel started the process, in its ticks: another process may have got the same pid."""
    dashboard: str = ""
    is_ready: bool = False


class StateFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.logs = path / "logs"
        self.journal = path / "journal"
        self.spool = path / "spool"
        self.atropos = path / "atropos.json"
        self.environment = path / "env"
        self._record = path / "up.json"
        self._lock = path / "lock"
        self.key_file = path / "key"
        self.issued_keys = path / "keys.json"
        self.ray = path / "ray"
        """Leads to the files of the Ray cluster, its logs among them."""
        self._ray_token = path / "ray_token"

    def make(self) -> None:
        """Forbidden if there is one that is not ours."""
        with suppress(FileExistsError):
            self.path.mkdir(mode=0o700)
        self.require_ours()
        self.logs.mkdir(exist_ok=True)
        (self.path / ".gitignore").write_text("*\n")

    def require_ours(self) -> None:
        """Forbidden if the folder exists and is not ours."""
        with suppress(FileNotFoundError):
            if (why := why_folder_is_not_ours(self.path)) is not None:
                raise Forbidden(
                    f"{self.path} is not used: {why}. It may contain a key that others know. Work in another folder, "
                    f"or move it away: mv {self.path} {self.path}.old. If all that is in it is yours: "
                    f"chmod -R go= {self.path}"
                )

    @contextmanager
    def occupied(self) -> Iterator[None]:
        """Holds the lock during the block. Conflict if another process holds it."""
        with self._lock.open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Conflict(_already(self.record())) from None
            try:
                yield
            finally:
                self._record.unlink(missing_ok=True)
                self.environment.unlink(missing_ok=True)

    def is_occupied(self) -> bool:
        with suppress(FileNotFoundError), self._lock.open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def record(self) -> RunRecord | None:
        """The last record, of a running or a killed process."""
        with suppress(FileNotFoundError, ValueError, TypeError):
            return RunRecord(**orjson.loads(self._record.read_bytes()))
        return None

    def write_record(self, record: RunRecord) -> None:
        with replacing_file(self._record) as file:
            file.write(orjson.dumps(asdict(record), option=orjson.OPT_INDENT_2))

    def write_environment(self, env: Mapping[str, str]) -> None:
        """Writes a file that a shell reads with `. .stepwell/env`."""
        lines = (f"export {name}={shlex.quote(value)}\n" for name, value in env.items())
        self.environment.unlink(missing_ok=True)
        _write_private(self.environment, "".join(lines))

    def key(self) -> str:
        """The control key: made once, then kept. To change it, write another into its file."""
        return self._secret(self.key_file, lambda: secrets.token_urlsafe(KEY_BYTES))

    def ray_token(self) -> Path:
        """The file with the token of our Ray cluster: made once, then kept."""
        self._secret(self._ray_token, lambda: secrets.token_hex(TOKEN_BYTES))
        return self._ray_token

    def keep_ray_folder(self, new: Path) -> None:
        """Note where Ray's files are, and remove those of the run before."""
        from stepwell.pool.client.ray_cluster import RAY_FOLDER

        if self.ray.is_symlink():
            before = self.ray.readlink()
            with suppress(OSError):
                if before.name.startswith(RAY_FOLDER) and why_folder_is_not_ours(before) is None:
                    shutil.rmtree(before, ignore_errors=True)
            self.ray.unlink()
        self.ray.symlink_to(new)

    def _secret(self, path: Path, make: Callable[[], str]) -> str:
        """The text of a file with a secret, which is made if it is missing. Forbidden if others may know it."""
        try:
            return read_own(path).strip()
        except FileNotFoundError:
            _write_private(path, make())
            return read_own(path).strip()
        except PermissionError as failure:
            raise Forbidden(f"{path} is not used: {failure}. Remove it, and another one is made") from None


def this_folder() -> StateFolder:
    """Forbidden if there is one that is not ours."""
    folder = StateFolder(Path.cwd() / NAME)
    folder.require_ours()
    return folder


def started(pid: int) -> int | None:
    """When a process was started, in the kernel's ticks; None if it has ended, or without /proc."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return None


def send(record: RunRecord, signal_: signal.Signals) -> bool:
    """Sends the signal; False if the process of that record has ended."""
    if started(record.pid) != record.started:
        return False
    with suppress(ProcessLookupError):
        os.kill(record.pid, signal_)
        return True
    return False


def _write_private(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def _already(record: RunRecord | None) -> str:
    who = f" (pid {record.pid})" if record else ""
    return f"it is running in this folder already{who}: `stepwell status` shows it, `stepwell down` stops it"
