"""The way to a DataPool: for gateways (`PoolClient`, async) and for trainers (`DataPool`, plain calls).

What always holds: a call is routed by prompt_uid alone; a shard that is restarting is waited for, with a bound; what
comes back wrong comes back as one of our own errors, with one line of text.
"""

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from stepwell.core.batch import Batch
from stepwell.core.columns import pack
from stepwell.core.pool import TRAIN, Ending, Registration, Verdict
from stepwell.core.routing import shard_of
from stepwell.core.stats import PoolStats
from stepwell.core.step import Step
from stepwell.errors import PoolUnavailable, StepwellError
from stepwell.pool.cluster import join_ray

T = TypeVar("T")

PATIENCE = 30.0
"""Seconds a call waits for a shard that is away; a killed one is back after some three."""
PAUSE = 0.2
VERSION_POLL = 30.0


class PoolClient:
    """Reaches every shard of one DataPool. Holds nothing but handles, which it finds again when they break."""

    def __init__(self, name: str, namespace: str) -> None:
        self.name = name
        self._namespace = namespace
        self._shard_names = (name,)
        self._handles: dict[str, ActorHandle[Any]] = {}
        self._version = 0

    @property
    def policy_version(self) -> int:
        return self._version

    async def knows(self, trajectory_uid: str, prompt_uid: str) -> bool:
        known: bool = await self._ask(self._shard(prompt_uid), "knows", trajectory_uid, prompt_uid)
        return known

    async def register_trajectory(self, wanted: Registration) -> None:
        await self._ask(self._shard(wanted.prompt_uid), "register_trajectory", wanted)

    async def submit_steps(
        self, steps: Sequence[Step], *, channel: str | None = None, group_size: int | None = None
    ) -> list[Verdict]:
        by_shard: dict[str, list[int]] = {}
        for i, step in enumerate(steps):
            by_shard.setdefault(self._shard(step.prompt_uid), []).append(i)

        async def submit(shard: str, places: list[int]) -> dict[int, Verdict]:
            message = pack([steps[i] for i in places])
            return dict(zip(places, await self._ask(shard, "submit_steps", message, channel, group_size), strict=True))

        answers = await asyncio.gather(*(submit(shard, places) for shard, places in by_shard.items()))
        verdicts = {place: verdict for answer in answers for place, verdict in answer.items()}
        return [verdicts[i] for i in range(len(steps))]

    async def complete_trajectory(self, trajectory_uid: str, prompt_uid: str, reward: float | None) -> Ending:
        args = (trajectory_uid, prompt_uid, reward)
        ending: Ending = await self._ask(self._shard(prompt_uid), "complete_trajectory", *args)
        return ending

    async def abort_trajectory(self, trajectory_uid: str, prompt_uid: str) -> Ending:
        ending: Ending = await self._ask(self._shard(prompt_uid), "abort_trajectory", trajectory_uid, prompt_uid)
        return ending

    async def fetch_batch(self, groups: int, channel: str, timeout: float) -> Batch:
        (shard,) = self._shard_names
        batch: Batch = await self._ask(shard, "fetch_batch", groups, channel, timeout, patience=timeout + PATIENCE)
        return batch

    async def set_policy_version(self, version: int) -> None:
        await asyncio.gather(*(self._ask(shard, "set_policy_version", version) for shard in self._shard_names))
        self._version = version

    async def stats(self) -> PoolStats:
        (shard,) = self._shard_names
        stats: PoolStats = await self._ask(shard, "stats")
        return stats

    async def quarantined(self) -> list[Step]:
        answers = await asyncio.gather(*(self._ask(shard, "quarantined") for shard in self._shard_names))
        return [step for answer in answers for step in answer]

    async def check(self) -> None:
        await asyncio.gather(*(self._ask(shard, "policy_version", patience=2.0) for shard in self._shard_names))

    async def follow(self) -> None:
        """Keep `policy_version` fresh, until cancelled. A new version is known here as soon as the pool has it."""
        shard = self._shard_names[0]
        known: int | None = None
        while True:
            try:
                patience = VERSION_POLL + PATIENCE
                known = await self._ask(shard, "policy_version", known, VERSION_POLL, patience=patience)
                self._version = known
            except PoolUnavailable:
                await asyncio.sleep(1.0)

    def _shard(self, prompt_uid: str) -> str:
        return self._shard_names[shard_of(prompt_uid, len(self._shard_names))]

    async def _ask(self, shard: str, method: str, *args: Any, patience: float = PATIENCE) -> Any:
        """Call a shard, again while it restarts, for `patience` seconds at most."""
        why = "it did not answer"
        try:
            async with asyncio.timeout(patience):
                while True:
                    try:
                        return await getattr(await self._handle(shard), method).remote(*args)
                    except RayActorError as failure:
                        self._handles.pop(shard, None)
                        why = f"it is away ({type(failure).__name__})"
                    await asyncio.sleep(PAUSE)
        except TimeoutError:
            raise PoolUnavailable(f"DataPool {shard!r}: no {method} within {patience:g} s; {why}") from None
        except StepwellError as refusal:
            raise getattr(refusal, "cause", refusal) from None  # Ray wraps it in a traceback of the actor's

    async def _handle(self, shard: str) -> ActorHandle[Any]:
        if shard not in self._handles:
            try:
                self._handles[shard] = await asyncio.to_thread(ray.get_actor, shard, self._namespace)
            except ValueError:
                raise PoolUnavailable(
                    f"no DataPool named {shard!r} in Ray namespace {self._namespace!r}; create it with: "
                    f"stepwell pool --name {shard} --ray-namespace {self._namespace}"
                ) from None
        return self._handles[shard]


class DataPool:
    """A DataPool for a training loop: plain calls, usable in scripts and notebooks alike."""

    def __init__(self, client: PoolClient) -> None:
        self._client = client
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="stepwell-pool", daemon=True).start()

    def fetch_batch(self, groups: int, *, channel: str = TRAIN, timeout: float = 60.0) -> Batch:
        """The oldest ready groups, as soon as there are that many. FetchTimeout says what was still missing."""
        return self._run(self._client.fetch_batch(groups, channel, timeout))

    def set_policy_version(self, version: int) -> None:
        """Call it when the engines hold new weights: tokens sampled from now on carry this version."""
        self._run(self._client.set_policy_version(version))

    def stats(self) -> PoolStats:
        return self._run(self._client.stats())

    def quarantined(self) -> list[Step]:
        """The last steps that were found unfit for training, each with its reason."""
        return self._run(self._client.quarantined())

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()


def connect(name: str = "data_pool", *, address: str = "auto", namespace: str = "default") -> DataPool:
    """Reach the DataPool of that name, joining the Ray cluster first if this process has not."""
    join_ray(address, namespace)
    return DataPool(PoolClient(name, namespace))
