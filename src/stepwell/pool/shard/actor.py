"""Creating a DataPool's shards on Ray, or finding them there.

What always holds: they outlive whoever started them, and restart by themselves; a start that cannot succeed ends what
it made, and nothing that was there.
"""

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError
from ray.util import list_named_actors

from stepwell.errors import PoolUnavailable
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.shard.service import ShardService

WAITERS = 10_000
"""Calls served at once. A waiting fetch occupies one, so there must be far more than consumers."""
START_TIMEOUT = 120.0
ASK_AGAIN = 1.0
"""Seconds until a shard that is restarting is asked again."""
SHARE = 0.001
"""Of the resource that places a shard: so little that any number of shards fits on one node."""


def start_pool(plan: PoolPlan, namespace: str, *, timeout: float = START_TIMEOUT) -> PoolPlan:
    """Create the pool's actors, or find them if they are there; gives the plan they follow."""
    found = {actor["name"] for actor in list_named_actors(all_namespaces=True) if actor["namespace"] == namespace}
    shards = {name: _shard(plan, name, namespace) for name in plan.shard_names()}
    made = [shard for name, shard in shards.items() if name not in found]
    try:
        return _plans(list(shards.values()), timeout)[0]
    except GetTimeoutError:
        text = f"DataPool {plan.name!r} did not start within {timeout:g} s"
        if plan.resource is None or plan.resource in ray.cluster_resources():  # type: ignore[no-untyped-call]
            raise PoolUnavailable(text) from None
        _end(made)
        raise PoolUnavailable(f"{text}: {_nowhere(plan.resource)}") from None
    except RayActorError as failure:
        _end(made)
        raise PoolUnavailable(f"DataPool {plan.name!r} could not start: {_last_line(str(failure))}") from None


def _shard(plan: PoolPlan, name: str, namespace: str) -> Any:
    options = ray.remote(ShardService).options(
        name=name,
        namespace=namespace,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_concurrency=WAITERS,
        num_cpus=0,
        resources={plan.resource: SHARE} if plan.resource else None,
    )
    return options.remote(plan, name)


def _plans(shards: Sequence[Any], timeout: float) -> list[PoolPlan]:
    """What each follows. One that is restarting is asked again."""
    deadline = time.monotonic() + timeout
    while (left := deadline - time.monotonic()) > 0:
        try:
            plans: list[PoolPlan] = ray.get([shard.plan.remote() for shard in shards], timeout=left)
            return plans
        except ActorUnavailableError:
            time.sleep(min(left, ASK_AGAIN))
    raise GetTimeoutError


def _end(shards: Sequence[Any]) -> None:
    for shard in shards:
        ray.kill(shard)


def _nowhere(resource: str) -> str:
    return (
        f"no Ray node offers the resource {resource!r}. Start the node that has the journals' volume with: "
        f"ray start --resources='{{\"{resource}\": 1}}'"
    )


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1].strip()
