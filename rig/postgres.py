"""A PostgreSQL server of the tests' own: Debian's, in a temporary folder, on loopback, as a user without rights.

It is stopped hard, and its data is deleted.
"""

import functools
import getpass
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rig.gateways import free_port
from rig.waiting import wait_until

LOOPBACK = "127.0.0.1"
OTHER_USER = "nobody"
"""PostgreSQL does not run as root."""
QUICK = ("fsync=off", "full_page_writes=off")
"""For tests that never lose power."""
SMALL = ("shared_buffers=32MB", "max_connections=50", "logging_collector=off")


class PostgresServer:
    """Use it through `postgres_server`."""

    def __init__(self, folder: Path, settings: Sequence[str]) -> None:
        self.folder = folder
        self.port = free_port()
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self.port}"

    @property
    def url(self) -> str:
        return url_of(self)

    def create(self) -> None:
        as_user(program("initdb"), "--pgdata", self.folder, "--username=postgres", "--auth=trust", "--no-sync")

    def copy(self, primary: "PostgresServer") -> None:
        """Become a streaming replica."""
        source = f"host={LOOPBACK} port={primary.port} user=postgres application_name=replica"
        as_user(program("pg_basebackup"), "--pgdata", self.folder, "--dbname", source, "--write-recovery-conf")

    def start(self) -> None:
        options = (f"listen_addresses={LOOPBACK}", f"port={self.port}", "unix_socket_directories=", *SMALL)
        line = [program("postgres"), "-D", str(self.folder)]
        for option in (*options, *self._settings):
            line += ["-c", option]
        with self.folder.with_name(f"{self.folder.name}.log").open("ab") as log:
            self._process = subprocess.Popen(line, stdout=log, stderr=log, start_new_session=True, **identity())
        wait_until(self._answers, "PostgreSQL to answer")

    def kill(self) -> None:
        """SIGKILL to all its processes."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def promote(self) -> None:
        as_user(program("pg_ctl"), "promote", "--pgdata", self.folder, "--wait")

    def ask(self, query: str) -> str:
        """The first value of the answer."""
        line = (program("psql"), url_of(self), "--no-psqlrc", "--tuples-only", "--no-align", "--command", query)
        return as_user(*line).strip()

    def _answers(self) -> bool:
        line = [program("pg_isready"), "--quiet", "--host", LOOPBACK, "--port", str(self.port)]
        return subprocess.run(line, check=False).returncode == 0


def url_of(*servers: PostgresServer) -> str:
    """Of several, the one that takes writes is used."""
    return f"postgresql://postgres@{','.join(server.address for server in servers)}/postgres"


@contextmanager
def postgres_server(*settings: str) -> Iterator[PostgresServer]:
    with postgres_folder() as folder:
        server = PostgresServer(folder / "data", settings)
        server.create()
        try:
            server.start()
            yield server
        finally:
            server.kill()


@contextmanager
def postgres_folder() -> Iterator[Path]:
    """A folder that the user of PostgreSQL can write to."""
    with tempfile.TemporaryDirectory(prefix="postgres-") as folder:
        if identity():
            os.chown(folder, pwd.getpwnam(OTHER_USER).pw_uid, -1)
        yield Path(folder)


def has_postgres() -> bool:
    return _folder() is not None


def program(name: str) -> str:
    folder = _folder()
    assert folder is not None, "PostgreSQL is not installed: apt-get install postgresql"
    return str(folder / name)


def as_user(*line: object) -> str:
    done: subprocess.CompletedProcess[str] = subprocess.run(
        [str(part) for part in line], capture_output=True, text=True, timeout=120, check=False, cwd="/", **identity()
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def identity() -> dict[str, Any]:
    """For subprocess."""
    return {"user": OTHER_USER} if getpass.getuser() == "root" else {}


@functools.cache
def _folder() -> Path | None:
    """Debian does not put the server on the PATH."""
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: int(path.parts[4]))
    found = versions[-1] if versions else shutil.which("postgres")
    return None if found is None else Path(found).resolve().parent
