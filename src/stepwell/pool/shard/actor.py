"""The shards of a DataPool as Ray actors.

- The actors outlive the process that starts them, and restart by themselves.
- A start that fails ends the actors that it made, and no others.
"""

import gc
import logging
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError
from ray.util import list_named_actors

from stepwell.errors import JournalRefused, PoolUnavailable
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.shard.archive import ParquetArchive
from stepwell.pool.shard.service import ShardService
from stepwell.pool.shard.sqlite_journal import SqliteJournal

log = logging.getLogger("stepwell.pool")

MAX_CONCURRENT_CALLS = 10_000
"""A waiting fetch is one call, so this must be far more than the number of consumers."""
START_TIMEOUT = 120.0
RETRY_PAUSE = 1.0
"""Seconds until a shard that restarts is asked again."""
RESOURCE_SHARE = 0.001
"""Of the resource that places a shard: so little that any number of shards fits on one node."""
GC_THRESHOLD = (100_000, 50, 100)
"""A pool holds many objects without cycles; the search for cycles among them is useless work."""


class ShardActor(ShardService):
    """A shard with the files that its plan names. The class that Ray runs.

    The process ends when the journal fails: Ray starts another one, which continues from the journal. If that cannot
    use the journal, it says so to every caller and waits for it: a constructor that fails would end the actor for good.
    """

    def __init__(self, plan: PoolPlan, name: str) -> None:
        gc.set_threshold(*GC_THRESHOLD)
        journal = archive = refusal = None
        if plan.journal is not None:
            open_journal = partial(
                SqliteJournal, Path(plan.journal) / f"{name}.sqlite", closed_kept=plan.limits.closed_kept
            )
            try:
                journal = open_journal()
                archive = ParquetArchive(plan.archive, name, journal) if plan.archive else None
            except JournalRefused as failure:
                if not _is_restarted():
                    raise
                log.error("shard %s waits for its journal: %s", name, failure)
                refusal = f"shard {name} waits for its journal: {failure}"
                Thread(target=_end_when_opened, args=(open_journal,), name="await-journal", daemon=True).start()
        super().__init__(plan, name, journal=journal, archive=archive, refusal=refusal, on_journal_failure=_end_process)


def _is_restarted() -> bool:
    return bool(ray.is_initialized() and ray.get_runtime_context().was_current_actor_reconstructed)


def _end_when_opened(open_journal: Callable[[], SqliteJournal]) -> None:
    while True:
        time.sleep(RETRY_PAUSE)
        try:
            open_journal().close()
        except Exception as failure:  # noqa: BLE001 - whatever it is, the next try may work
            log.debug("the journal cannot be opened yet: %s", failure)
        else:
            _end_process()


def _end_process() -> None:
    """At once: nothing may be answered any more. Ray starts the next one."""
    logging.shutdown()
    os._exit(1)


def start_pool(plan: PoolPlan, namespace: str, *, timeout: float = START_TIMEOUT) -> PoolPlan:
    """Create the pool's actors, or find those that run already. Returns the plan that they follow."""
    running = {actor["name"] for actor in list_named_actors(all_namespaces=True) if actor["namespace"] == namespace}
    shards = {name: _actor(plan, name, namespace) for name in plan.shard_names()}
    made = [shard for name, shard in shards.items() if name not in running]
    try:
        return _plans(list(shards.values()), timeout)[0]
    except GetTimeoutError:
        text = f"DataPool {plan.name!r} did not start within {timeout:g} s"
        if plan.resource is None or plan.resource in ray.cluster_resources():  # type: ignore[no-untyped-call]
            raise PoolUnavailable(text) from None
        _kill(made)
        raise PoolUnavailable(
            f"{text}: no Ray node offers the resource {plan.resource!r}. Start the node that has the journals' volume "
            f"with: ray start --resources='{{\"{plan.resource}\": 1}}'"
        ) from None
    except PoolUnavailable as refusal:
        raise getattr(refusal, "cause", refusal) from None  # Ray wraps it in a traceback of the actor
    except RayActorError as failure:
        _kill(made)
        last_line = str(failure).strip().splitlines()[-1].strip()
        raise PoolUnavailable(f"DataPool {plan.name!r} could not start: {last_line}") from None


def _actor(plan: PoolPlan, name: str, namespace: str) -> Any:
    options = ray.remote(ShardActor).options(
        name=name,
        namespace=namespace,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_concurrency=MAX_CONCURRENT_CALLS,
        num_cpus=0,
        resources={plan.resource: RESOURCE_SHARE} if plan.resource else None,
    )
    return options.remote(plan, name)


def _plans(shards: Sequence[Any], timeout: float) -> list[PoolPlan]:
    """The plan of each shard. A shard that restarts is asked again."""
    deadline = time.monotonic() + timeout
    while (left := deadline - time.monotonic()) > 0:
        try:
            plans: list[PoolPlan] = ray.get([shard.plan.remote() for shard in shards], timeout=left)
            return plans
        except ActorUnavailableError:
            time.sleep(min(left, RETRY_PAUSE))
    raise GetTimeoutError


def _kill(shards: Sequence[Any]) -> None:
    for shard in shards:
        ray.kill(shard)
