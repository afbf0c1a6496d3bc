"""The shards of a DataPool as Ray actors.

- The actors outlive the process that starts them, and restart by themselves.
- A start that fails ends the actors that it made, and no others.
"""

import asyncio
import gc
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from threading import Thread
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from stepwell.common.files import keep_files_private
from stepwell.common.message_format import portable_actor
from stepwell.common.own_process import machine_memory, usable_memory
from stepwell.errors import JournalRefused, PoolUnavailable
from stepwell.pool.api.leasing import Settlement
from stepwell.pool.api.plan import PoolPlan, bounded_limits
from stepwell.pool.api.transport import ActorAway, ActorMissing
from stepwell.pool.shard.archive import ParquetArchive
from stepwell.pool.shard.journal import ShardJournal
from stepwell.pool.shard.journal_store import JournalHeader, JournalIdentity
from stepwell.pool.shard.placement import find_journals, journal_backend, place_shards
from stepwell.pool.shard.ray_transport import RayTransport, wait_until_head_loses_state
from stepwell.pool.shard.resharding import LOOK_INTERVAL, DrainWatch, reshard
from stepwell.pool.shard.service import GC_THRESHOLD, ShardService
from stepwell.pool.slices.all import SLICES
from stepwell.pool.state.slice import Slice

log = logging.getLogger("stepwell.pool")

MAX_CONCURRENT_CALLS = 10_000
"""A waiting fetch is one call, so this must be far more than the number of consumers."""
START_TIMEOUT = 120.0
RETRY_PAUSE = 1.0
"""Seconds until a shard that restarts is asked again."""
RESOURCE_SHARE = 0.001
"""Of the resource that places a shard: so little that any number of shards fits on one node."""


class ShardActor(ShardService):
    """A shard with the files that its plan names. The class that Ray runs.

    The process ends when the journal fails: Ray starts another one, which continues from the journal. If that cannot
    use the journal, it says so to every caller and waits for it: a constructor that fails would end the actor for good.
    """

    def __init__(
        self,
        plan: PoolPlan,
        name: str,
        *,
        must_exist: bool = False,
        namespace: str = "default",
        shards: int | None = None,
        slices: Sequence[type[Slice]] = SLICES,
    ) -> None:
        """`must_exist`: the shard has a journal, and does not begin without it. That holds after a restart anyway.
        `namespace` is where the other shards are. `shards` shards share the memory, if not those of the plan."""
        gc.set_threshold(*GC_THRESHOLD)
        keep_files_private()
        open_journal = None if plan.journal is None else partial(_open_journal, plan, name, must_exist)
        try:
            self._start(plan, name, namespace, shards or plan.shards, open_journal, slices)
        except Exception as failure:
            if not _is_restarted() or open_journal is None:
                raise
            refusal = f"shard {name} waits for its journal: {failure}"
            log.error("%s", refusal)
            super().__init__(plan, name, refusal=refusal)
            Thread(target=_end_when_opened, args=(open_journal,), name="await-journal", daemon=True).start()
        Thread(target=_end_if_lost, args=(name,), name="cluster-watch", daemon=True).start()
        if name == plan.name:
            Thread(target=_watch_drains, args=(name, namespace), name="drain-watch", daemon=True).start()

    def _start(
        self,
        plan: PoolPlan,
        name: str,
        namespace: str,
        shards: int,
        open_journal: Callable[[], ShardJournal] | None,
        slices: Sequence[type[Slice]],
    ) -> None:
        ask = partial(_ask_decision, RayTransport(namespace))
        limits = bounded_limits(replace(plan, shards=shards), usable_memory(machine_memory()))
        log.info("shard %s holds at most %s bytes in a channel", name, limits.max_bytes)
        if open_journal is None:
            super().__init__(plan, name, slices=slices, limits=limits, ask_decision=ask)
            return
        journal = open_journal()
        try:
            archive = None
            if plan.archive is not None:
                archive = ParquetArchive(plan.archive, name, journal, max_bytes=plan.limits.max_bytes)
            super().__init__(
                plan,
                name,
                slices=slices,
                limits=limits,
                journal=journal,
                archive=archive,
                on_journal_failure=_end_process,
                ask_decision=ask,
            )
        except Exception:
            journal.store.close()
            raise


async def _ask_decision(peers: RayTransport, shard: str, decision_uid: str) -> Settlement:
    """Of another shard. If it has not decided, it decides against the batch."""
    settlement: Settlement = await peers.call(shard, "nack", (decision_uid,), {})
    return settlement


def _open_journal(plan: PoolPlan, name: str, must_exist: bool) -> ShardJournal:
    journal = str(plan.journal)
    return journal_backend(journal).open(
        journal,
        name,
        JournalIdentity(pool=plan.name, pool_uid=plan.uid, shards=plan.shards, index=plan.index_of(name)),
        closed_kept=plan.limits.closed_kept,
        must_exist=must_exist or _is_restarted(),
        sync=plan.sync,
    )


def _end_if_lost(name: str) -> None:
    """A shard that the head has lost must not write to its journal beside the shard that replaces it."""
    wait_until_head_loses_state()
    log.error("shard %s ends: Ray's head has lost its state", name)
    _end_process()


def _watch_drains(pool: str, namespace: str) -> None:
    asyncio.run(_end_changes(pool, namespace))


async def _end_changes(pool: str, namespace: str) -> None:
    """The first shard ends a change of the shards, whichever process has begun it."""

    async def end(shards: Sequence[str]) -> None:
        await asyncio.to_thread(_kill, [ray.get_actor(shard, namespace) for shard in shards])

    watch = DrainWatch(RayTransport(namespace), pool, end)
    while True:
        await asyncio.sleep(LOOK_INTERVAL)
        try:
            await watch.look()
        except Exception as failure:  # noqa: BLE001 - whatever it is, the next look goes on
            log.debug("the change of the shards cannot go on now: %s", failure)


def _is_restarted() -> bool:
    return bool(ray.is_initialized() and ray.get_runtime_context().was_current_actor_reconstructed)


def _end_when_opened(open_journal: Callable[[], ShardJournal]) -> None:
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


def start_pool(
    plan: PoolPlan,
    namespace: str,
    *,
    timeout: float = START_TIMEOUT,
    new_journals: bool = False,
    slices: Sequence[type[Slice]] = SLICES,
) -> PoolPlan:
    """Create the pool's actors, or find those that run already. Returns the plan that they follow.

    `new_journals`: create journals that are missing while others of the pool are there. `slices` are classes that the
    actors can import.
    """
    deadline = time.monotonic() + timeout
    running = {actor["name"] for actor in list_named_actors(all_namespaces=True) if actor["namespace"] == namespace}
    made: list[Any] = []
    try:
        must_exist = False
        if plan.name in running:
            (plan,) = _plans([ray.get_actor(plan.name, namespace)], timeout)
            must_exist = not new_journals
        elif plan.journal is not None:
            plan, must_exist = _place(plan, deadline, new_journals)
        shards = [_actor(plan, name, namespace, must_exist, slices) for name in plan.shard_names()]
        made = [shard for name, shard in zip(plan.shard_names(), shards, strict=True) if name not in running]
        return _plans(shards, deadline - time.monotonic())[0]
    except GetTimeoutError:
        text = f"DataPool {plan.name!r} did not start within {timeout:g} s"
        is_pinned = plan.journal is not None and plan.resource is None and journal_backend(plan.journal).is_local
        if is_pinned and plan.name in running:
            raise PoolUnavailable(
                f"{text}: its actors are there and wait. If the node with its journals is away, start Ray there again"
            ) from None
        if plan.resource is None or plan.resource in ray.cluster_resources():  # type: ignore[no-untyped-call]
            raise PoolUnavailable(text) from None
        _kill(made)
        raise PoolUnavailable(
            f"{text}: no Ray node offers the resource {plan.resource!r}. Start the node that has the journals' volume "
            f"with: ray start --resources='{{\"{plan.resource}\": 1}}'"
        ) from None
    except PoolUnavailable as refusal:
        raise getattr(refusal, "cause", refusal) from None  # Ray wraps it in a traceback of the actor
    except JournalRefused as refusal:
        raise PoolUnavailable(f"DataPool {plan.name!r} could not start: {refusal}") from None
    except RayActorError as failure:
        _kill(made)
        last_line = str(failure).strip().splitlines()[-1].strip()
        raise PoolUnavailable(f"DataPool {plan.name!r} could not start: {last_line}") from None


def reshard_pool(
    pool: str,
    shards: int,
    namespace: str,
    *,
    timeout: float = START_TIMEOUT,
    slices: Sequence[type[Slice]] = SLICES,
) -> PoolPlan:
    """Change the number of shards of a pool that runs. Returns the plan that it follows from now on.

    New groups go to the new shards at once. Shards that are too many end later, when they are empty.
    """
    transport = RayTransport(namespace)

    async def start(plan: PoolPlan, changed: PoolPlan) -> None:
        running = {actor["name"] for actor in list_named_actors(all_namespaces=True) if actor["namespace"] == namespace}
        joining = [name for name in changed.shard_names()[len(plan.shard_names()) :] if name not in running]
        made = [_actor(changed, name, namespace, False, slices, follows=plan) for name in joining]
        try:
            await asyncio.to_thread(_plans, made, timeout)
        except BaseException:
            _kill(made)
            raise

    async def change() -> PoolPlan:
        plan: PoolPlan = await transport.call(pool, "plan", (), {})
        return await reshard(transport, plan, shards, start)

    try:
        return asyncio.run(change())
    except (ActorAway, ActorMissing, GetTimeoutError, RayActorError, TimeoutError) as failure:
        last_line = (str(failure).strip().splitlines() or [type(failure).__name__])[-1].strip()
        raise PoolUnavailable(f"the shards of DataPool {pool!r} could not be changed: {last_line}") from None


def _place(plan: PoolPlan, deadline: float, new_journals: bool) -> tuple[PoolPlan, bool]:
    """Look for journals wherever they may be."""
    journal = str(plan.journal)
    is_local = journal_backend(journal).is_local
    found, home = _find_on_nodes(plan, deadline) if is_local else ({"": find_journals(journal, plan.name)}, "")
    placed, must_exist = place_shards(plan, found, home, new_journals=new_journals)
    return (placed if is_local and plan.resource is None else replace(placed, nodes=())), must_exist


def _find_on_nodes(plan: PoolPlan, deadline: float) -> tuple[dict[str, dict[str, JournalHeader]], str]:
    """The journals by the address of their node, and the address where new ones are created: this one if possible."""
    here = ray.get_runtime_context().get_node_id()
    nodes = _nodes(plan)
    while not nodes and time.monotonic() < deadline:
        time.sleep(RETRY_PAUSE)
        nodes = _nodes(plan)
    if not nodes:
        raise GetTimeoutError
    folder = str(plan.journal)
    asked = {
        address: ray.remote(find_journals)
        .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
        .remote(folder, plan.name)
        for address, node in nodes.items()
        if node != here
    }
    found = {address: find_journals(folder, plan.name) for address, node in nodes.items() if node == here}
    left = max(RETRY_PAUSE, deadline - time.monotonic())
    found |= dict(zip(asked, ray.get(list(asked.values()), timeout=left), strict=True))
    at_home = [address for address, node in nodes.items() if node == here]
    return found, (at_home or sorted(nodes))[0]


def _nodes(plan: PoolPlan) -> dict[str, str]:
    """The nodes that may have journals: their ids by address."""
    alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    offering = [node for node in alive if plan.resource is None or plan.resource in node["Resources"]]
    here = ray.get_runtime_context().get_node_id()
    offering.sort(key=lambda node: bool(node["NodeID"] == here))  # of several with one address, this one counts
    return {node["NodeManagerAddress"]: node["NodeID"] for node in offering}


def _actor(
    plan: PoolPlan,
    name: str,
    namespace: str,
    must_exist: bool,
    slices: Sequence[type[Slice]],
    *,
    follows: PoolPlan | None = None,
) -> Any:
    """A shard of the plan. `follows` is the plan in force, if the other one is not yet."""
    chosen = {} if slices is SLICES else {"slices": slices}  # a process of any release can read what Ray keeps
    is_local = plan.journal is not None and journal_backend(plan.journal).is_local
    place = plan.resource or (f"node:{plan.nodes[plan.shard_names().index(name)]}" if plan.nodes else None)
    options: Any = ray.remote(portable_actor(ShardActor)).options(
        name=name,
        namespace=namespace,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_concurrency=MAX_CONCURRENT_CALLS,
        num_cpus=0,
        resources={place: RESOURCE_SHARE} if place else None,
        scheduling_strategy="DEFAULT" if is_local else "SPREAD",
    )
    placed = {"must_exist": must_exist, "namespace": namespace, "shards": plan.shards}
    return options.remote(follows or plan, name, **placed, **chosen)


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
