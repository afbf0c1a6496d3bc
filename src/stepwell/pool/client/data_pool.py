"""How trainers reach a DataPool, by calls that block."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, Unpack

from stepwell.errors import PoolUnavailable
from stepwell.pool.api.leasing import BatchTerms, HasLeases
from stepwell.pool.api.policy import Canary, ChannelPolicy, PolicyDecision, PolicyStatus, VersionRewards
from stepwell.pool.api.producing import TRAIN, Pacing, RewardGiven
from stepwell.pool.api.stats import PoolStats
from stepwell.pool.client.batch import Batch
from stepwell.pool.client.pool_client import PoolClient
from stepwell.pool.client.ray_cluster import join_ray
from stepwell.pool.slices.curation import AuditEntry, Curation, CurationOutcome
from stepwell.steps.step import Step

T = TypeVar("T")


class DataPool:
    """A DataPool for a training loop. Its calls block; they work in scripts and in notebooks."""

    def __init__(self, client: PoolClient) -> None:
        self._client = client
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="stepwell-pool", daemon=True).start()

    def fetch_batch(
        self, count: int, *, timeout: float = 60.0, lease: float | None = None, **terms: Unpack[BatchTerms]
    ) -> Batch:
        """The oldest ready groups (or trajectories, or steps), as soon as there are that many.

        FetchTimeout says what is missing. With a `lease`, a batch is yours until you acknowledge or return it, or this
        process dies; `lease` is the longest time in seconds without heartbeats from here. Without a lease, it counts as
        trained on arrival. The terms, all optional: `channel`, `unit` ("groups",
        "trajectories", "steps"), `order` ("oldest_ready", "strict"; else the pool's), `history` (the share drawn from
        trained groups), `min_exactness` ("engine", "submitted", "retokenized") and `untrainable` (include steps that
        are marked so).
        """
        return self._run(self._client.fetch_batch(count, timeout=timeout, lease=lease, **terms))

    def fetch_ready(self, most: int, *, lease: float, **terms: Unpack[BatchTerms]) -> list[Batch]:
        """What is ready now, at most so many groups (or trajectories, or steps), each as a batch of its own.

        For a trainer that takes single groups and acknowledges them one by one: it costs one call for all of them. With
        several shards, each gives its oldest ones. `lease` and the terms are those of `fetch_batch`.
        """
        return self._run(self._client.fetch_ready(most, lease=lease, **terms))

    @contextmanager
    def batch(
        self, count: int, *, timeout: float = 60.0, lease: float = 600.0, **terms: Unpack[BatchTerms]
    ) -> Iterator[Batch]:
        """A batch for a `with` block: acknowledged at its end, given back on an exception."""
        batch = self.fetch_batch(count, timeout=timeout, lease=lease, **terms)
        try:
            yield batch
        except BaseException:
            self.nack(batch)
            raise
        self.ack(batch)

    def ack(self, leased: HasLeases) -> None:
        """The batch was trained, all of it. LeaseExpired if the pool has not heard of this process for too long: the
        batch will be handed out again. PoolUnavailable if a shard is away: call it again later."""
        self._run(self._client.ack(leased))

    def nack(self, leased: HasLeases) -> None:
        """The batch was not trained: it goes back to the head of the queue."""
        self._run(self._client.nack(leased))

    def give_reward(self, reward: RewardGiven) -> bool:
        """Score a trajectory or one of its steps, also for a second time.

        If it is already shipped, the archive keeps the reward; False if there is no archive.
        """
        return self._run(self._client.give_reward(reward))

    def pacing(self, channel: str = TRAIN) -> Pacing:
        """How many new trajectories may start."""
        return self._run(self._client.pacing(channel))

    def set_policy_version(self, version: int, *, check: bool = True) -> None:
        """Call it when the engines have new weights and report their version; a WeightSync calls it by itself.

        Conflict if gateways know what their engines report, and none reports this version: engines without a known
        version get no calls. With `check=False` it is set all the same. A shard that is away gets the version when it
        is back, as long as this process lives.
        """
        self._run(self._client.set_policy_version(version, check=check))

    def announce_sync(self) -> None:
        """A trainer lives that brings weights to the engines; a WeightSync announces itself. Call it at least once a
        minute: as long as it is heard, gateways hold calls to engines that wait for weights, instead of failing them.
        """
        self._run(self._client.announce_sync())

    @property
    def policy_version(self) -> int:
        """The version that all sessions get, except those of a canary."""
        return self._run(self._client.newest_serving()).policy_version

    def channel_policy(self, channel: str) -> ChannelPolicy:
        """The adapter that serves the calls of a channel, and whether they are held."""
        return self._run(self._client.channel_policy(channel))

    def set_adapter(self, channel: str, adapter: str, version: int) -> None:
        """Call it when the engines have the adapter: the channel's calls go to it from now on, and its steps age by
        this version. Other channels notice nothing."""
        self._run(self._client.set_adapter(channel, adapter, version))

    def pause_channel(self, channel: str, *, paused: bool = True) -> None:
        """Gateways hold the channel's new calls until it goes on with `paused=False`."""
        self._run(self._client.pause_channel(channel, paused=paused))

    def canary(self) -> Canary | None:
        """The newer version that a share of the sessions gets."""
        return self._run(self._client.canary())

    def decide(self, decision: PolicyDecision, canary: Canary | None = None, policy_version: int | None = None) -> None:
        """Keeps a decision about a version and sets the canary, or ends it if it is None, in one change.

        `policy_version` is what all other sessions get from now on. Conflict if a version is to be promoted that was
        refused or rolled back. The same decision again changes nothing.
        """
        self._run(self._client.decide(decision, canary, policy_version))

    def decisions(self) -> list[PolicyDecision]:
        """The last decisions about versions, the oldest first."""
        return self._run(self._client.decisions())

    def version_rewards(self, channel: str = TRAIN, cursor: dict[str, str] | None = None) -> VersionRewards:
        """The first reward of each step and trajectory since the cursor, with the version that said it.

        Without a cursor, only where the rewards end now.
        """
        return self._run(self._client.version_rewards(channel, cursor))

    def policy_status(self, channel: str = TRAIN) -> PolicyStatus:
        """The canary, the last decisions, and what the versions earned lately in a channel."""
        return self._run(self._client.policy_status(channel))

    def engines(self) -> tuple[str, ...]:
        """The addresses of the engines that gateways use now."""
        return self._run(self._client.engines())

    def stats(self) -> PoolStats:
        """`missing` names the shards that did not answer within 1.5 seconds. They are not counted."""
        return self._run(self._client.stats())

    def curate(self, curation: Curation) -> CurationOutcome:
        """Mark, reject or relabel a trajectory. The decision holds for every later batch."""
        return self._run(self._client.curate(curation))

    def audit(self, limit: int = 200, trajectory_uid: str | None = None) -> list[AuditEntry]:
        """What people decided about trajectories, newest first. PoolUnavailable if a shard does not answer."""
        page = self._run(self._client.audit(limit, trajectory_uid))
        if page.missing:
            raise PoolUnavailable(f"no audit of {', '.join(page.missing)}, which did not answer; try again")
        return list(page.entries)

    def quarantined(self) -> list[Step]:
        """The last quarantined steps, each with its reason."""
        return self._run(self._client.quarantined())

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        running = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return running.result()
        except BaseException:  # a fetch that was interrupted must not go on and take a batch
            running.cancel()
            raise


def connect(name: str = "data_pool", *, address: str = "auto", namespace: str = "default") -> DataPool:
    """Reach the DataPool of that name, joining the Ray cluster first if this process has not."""
    join_ray(address, namespace)
    return DataPool(PoolClient(name, namespace))
