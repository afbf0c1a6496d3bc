"""Checks of this machine: packages, keys, disk, and Ray if a cluster is there."""

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

from stepwell.access.access_keys import AccessKeys
from stepwell.common.imports import install_command
from stepwell.doctor.findings import Check, Finding, Grade
from stepwell.errors import BadRequest, NotReady, RayUnreachable
from stepwell.pool.client.ray_cluster import AUTO, cluster_settings

SHOWN = ("stepwell", "ray", "vllm", "transformers", "tokenizers")
CONTROL_KEYS = "STEPWELL_GATEWAY_CONTROL_KEYS"
FREE_BYTES = 5 * 2**30
"""Bytes that should be free for a journal."""
SLOW_COMMIT = 0.1
"""Seconds; the pool commits once per message."""
NAMESPACE = "default"


def machine_checks(ray_address: str | None, folder: Path) -> list[Check]:
    return [
        Check("packages", packages()),
        Check("control keys", control_keys(os.environ.get(CONTROL_KEYS, ""))),
        Check("disk", disk(folder)),
        Check("Ray", ray(ray_address)),
        Check("sandbox", sandbox()),
    ]


def packages(version: Callable[[str], str] = metadata.version) -> Finding:
    """Whether the installed packages fit Stepwell's requirements."""
    from packaging.requirements import Requirement

    wrong = []
    for text in metadata.requires("stepwell") or ():
        required = Requirement(text)
        if required.marker is not None and not required.marker.evaluate({"extra": ""}):
            continue
        installed = _version(required.name, version)
        if installed is None or not required.specifier.contains(installed, prereleases=True):
            wrong.append(f"{required.name}{required.specifier} is required, {installed or 'none'} is installed")
    if wrong:
        return Finding(Grade.FAULT, "; ".join(wrong), install_command())
    versions = ((name, _version(name, version)) for name in SHOWN)
    shown = ", ".join(f"{name} {installed}" for name, installed in versions if installed)
    return Finding(Grade.OK, f"Python {platform.python_version()}, {shown}")


def control_keys(given: str) -> Finding:
    """The keys that a gateway started from this shell would use."""
    try:
        keys = AccessKeys(tuple(given.split(",")) if given else ())
    except BadRequest as wrong:
        return Finding(Grade.FAULT, str(wrong), f"correct {CONTROL_KEYS}")
    if keys.open:
        what = f"none in {CONTROL_KEYS}: a gateway started here would be open; `stepwell up` makes one"
        return Finding(Grade.OK, what)
    return Finding(Grade.OK, f"in {CONTROL_KEYS}")


def disk(folder: Path) -> Finding:
    """Whether the folder suits a journal or a spool: free space, and the time of a commit to disk."""
    try:
        free = shutil.disk_usage(folder).free
        seconds = _commit_seconds(folder)
    except (OSError, sqlite3.Error) as failure:
        return Finding(Grade.WARNING, f"{folder} cannot hold a journal: {failure}", "give --journal another folder")
    what = f"{free / 2**30:.0f} GiB free in {folder}, a commit takes {seconds * 1e3:.1f} ms"
    if free < FREE_BYTES:
        return Finding(Grade.WARNING, what, "give --journal and --archive a folder with more space")
    if seconds > SLOW_COMMIT:
        return Finding(Grade.WARNING, what, "give --journal a faster disk: the pool commits once per message")
    return Finding(Grade.OK, what)


def ray(address: str | None) -> Finding:
    try:
        found = address or _own_cluster()
        if found is None:
            return Finding(Grade.UNKNOWN, "no cluster of yours runs on this machine, and no --ray-address was given")
        return Finding(Grade.OK, _describe_cluster(found))
    except (RayUnreachable, RuntimeError) as failure:
        grade = Grade.FAULT if address else Grade.WARNING
        return Finding(grade, str(failure).splitlines()[0], "ray start --head, with the same Ray and Python everywhere")


def sandbox() -> Finding:
    """Where reward workers on this machine would run generated code."""
    from stepwell.rewards.confinement.sandbox import SandboxLevel, open_sandbox

    try:
        return Finding(Grade.OK, f"generated code runs {open_sandbox(SandboxLevel.STRICT).description}")
    except NotReady as why:
        remedy = "needed only for rewards that run generated code (python_tests); see docs/operations/security.md"
        return Finding(Grade.WARNING, str(why), remedy)


def _describe_cluster(address: str) -> str:
    """Joins the cluster and leaves it. RayUnreachable, or Ray's RuntimeError if versions differ, says why it cannot."""
    import ray

    from stepwell.pool.client.ray_cluster import join_ray

    was_initialized = ray.is_initialized()
    join_ray(address, NAMESPACE)
    try:
        nodes = sum(node["Alive"] for node in ray.nodes())  # type: ignore[no-untyped-call]
        cores = ray.cluster_resources().get("CPU", 0.0)  # type: ignore[no-untyped-call]
        joined = ray.get_runtime_context().gcs_address
        return f"Ray {ray.__version__} at {joined}: {nodes} {'node' if nodes == 1 else 'nodes'}, {cores:g} CPUs"
    finally:
        if not was_initialized:
            ray.shutdown()


def _version(name: str, version: Callable[[str], str]) -> str | None:
    try:
        return version(name)
    except metadata.PackageNotFoundError:
        return None


def _commit_seconds(folder: Path) -> float:
    """Seconds that a transaction takes in a database with the journal's settings."""
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


def _own_cluster() -> str | None:
    """RayUnreachable if one is written down where others can write."""
    return AUTO if cluster_settings() else None
