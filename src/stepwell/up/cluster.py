"""The Ray cluster of `up`: its own one, which ends with it, or an existing one that it joins."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from stepwell.pool.client.ray_cluster import join_ray, local_ray

STORE = 512 * 2**20
"""Bytes of Ray's object store, which large batches pass through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    address: str
    joining: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that another process needs to join it."""


@contextmanager
def own_cluster(namespace: str, token: Path) -> Iterator[Cluster]:
    """Started here; ends with the block."""
    with local_ray(namespace, token=token, store=STORE) as joining:
        yield Cluster(address=joining["RAY_ADDRESS"], joining=joining)


@contextmanager
def joined_cluster(address: str, namespace: str) -> Iterator[Cluster]:
    join_ray(address, namespace)
    yield Cluster(address=address)
