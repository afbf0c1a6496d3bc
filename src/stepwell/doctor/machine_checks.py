"""This machine: packages, keys, disk, and Ray if there is one."""

import os
import platform
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from importlib import metadata
from pathlib import Path

from stepwell.common.access_keys import AccessKeys
from stepwell.config.sections import split
from stepwell.doctor.findings import Check, Finding, Mark
from stepwell.errors import BadRequest, RayUnreachable

SHOWN = ("stepwell", "ray", "vllm", "transformers", "tokenizers")
CONTROL_KEYS = "STEPWELL_GATEWAY_CONTROL_KEYS"
ROOM = 5 * 2**30
"""Bytes that a journal should have at the least."""
SLOW_COMMIT = 0.1
"""Seconds; the pool commits once a message."""
RAYS_NOTE = Path(tempfile.gettempdir()) / "ray" / "ray_current_cluster"
"""Where `ray start` writes the address of this machine's cluster."""


def machine_checks(ray_address: str | None, folder: Path) -> list[Check]:
    return [
        Check("packages", packages()),
        Check("control keys", control_keys(os.environ.get(CONTROL_KEYS, ""))),
        Check("disk", disk(folder)),
        Check("Ray", ray(ray_address)),
    ]


def packages(version: Callable[[str], str] = metadata.version) -> Finding:
    """What Stepwell itself asks for, held against what is installed."""
    from packaging.requirements import Requirement

    wrong = []
    for text in metadata.requires("stepwell") or ():
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        have = _version(wanted.name, version)
        if have is None or not wanted.specifier.contains(have, prereleases=True):
            wrong.append(f"{wanted.name}{wanted.specifier} is wanted, {have or 'none'} is there")
    if wrong:
        return Finding(Mark.FAULT, "; ".join(wrong), "pip install --upgrade stepwell")
    found = ((name, _version(name, version)) for name in SHOWN)
    here = ", ".join(f"{name} {have}" for name, have in found if have)
    return Finding(Mark.OK, f"Python {platform.python_version()}, {here}")


def control_keys(given: str) -> Finding:
    """As a gateway started from this shell would read them."""
    try:
        keys = AccessKeys(tuple(split(given)))  # type: ignore[arg-type]
    except BadRequest as wrong:
        return Finding(Mark.FAULT, str(wrong), f"set {CONTROL_KEYS} anew")
    if keys.open:
        return Finding(
            Mark.OK, f"none in {CONTROL_KEYS}: a gateway started here would be open; `stepwell up` makes one"
        )
    return Finding(Mark.OK, f"in {CONTROL_KEYS}")


def disk(folder: Path) -> Finding:
    """Whether a journal or a spool could live here: room, and a commit that reaches the disk."""
    try:
        free = shutil.disk_usage(folder).free
        seconds = _commit(folder)
    except (OSError, sqlite3.Error) as failure:
        return Finding(Mark.WARNING, f"{folder} cannot hold a journal: {failure}", "give --journal another folder")
    told = f"{free / 2**30:.0f} GiB free in {folder}, a commit takes {seconds * 1e3:.1f} ms"
    if free < ROOM:
        return Finding(Mark.WARNING, told, "give --journal and --archive a folder with more room")
    if seconds > SLOW_COMMIT:
        return Finding(Mark.WARNING, told, "give --journal a faster disk: the pool commits once a message")
    return Finding(Mark.OK, told)


def ray(address: str | None) -> Finding:
    wanted = address or os.environ.get("RAY_ADDRESS") or _running_here()
    if wanted is None:
        return Finding(Mark.UNTOLD, "no cluster runs on this machine, and no --ray-address was given")
    from stepwell.doctor.ray_check import cluster

    try:
        return Finding(Mark.OK, cluster(wanted))
    except (RayUnreachable, RuntimeError) as failure:
        mark = Mark.FAULT if address else Mark.WARNING
        return Finding(mark, str(failure).splitlines()[0], "ray start --head, with the same Ray and Python everywhere")


def _version(name: str, version: Callable[[str], str]) -> str | None:
    try:
        return version(name)
    except metadata.PackageNotFoundError:
        return None


def _commit(folder: Path) -> float:
    """Seconds that a transaction takes in a database as the journal's."""
    with (
        tempfile.TemporaryDirectory(prefix=".stepwell-doctor-", dir=folder) as inside,
        closing(sqlite3.connect(Path(inside) / "journal", isolation_level=None)) as database,
    ):
        mode = database.execute("PRAGMA journal_mode=WAL").fetchone()[0]
        if mode != "wal":
            raise sqlite3.OperationalError(f"this file system has no write-ahead log, only {mode!r}")
        database.execute("PRAGMA synchronous=FULL")
        database.execute("CREATE TABLE step (tokens BLOB)")
        began = time.monotonic()
        database.execute("INSERT INTO step VALUES (?)", (bytes(4096),))
        return time.monotonic() - began


def _running_here() -> str | None:
    try:
        return RAYS_NOTE.read_text().strip() or None
    except OSError:
        return None
