"""The way to a DataPool: for gateways, reward workers, the Atropos server and watchers (`PoolClient`, async) and for
trainers (`DataPool`, plain calls).

What always holds: a call is routed by prompt_uid alone; a shard that is restarting is waited for, with a bound; what
comes back wrong comes back as one of our own errors, with one line of text.
"""

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, TypeVar, Unpack

from stepwell.errors import LeaseExpired, PoolUnavailable
from stepwell.pool.api.curation import AuditEntry, Curation, CurationOutcome
from stepwell.pool.api.leasing import (
    BatchTerms,
    HasLeases,
    LeasedGroups,
    ReadyGroups,
    Settlement,
    merge_ready_groups,
    read_batch_request,
)
from stepwell.pool.api.pacing import Pacing, merge_pacing
from stepwell.pool.api.producing import TRAIN, EndResult, Registration, RewardGiven, SubmitVerdict
from stepwell.pool.api.scoring import Judgement
from stepwell.pool.api.series import TimeSeries
from stepwell.pool.api.stats import PoolStats, merge_stats
from stepwell.pool.api.watching import Changes, Cursor
from stepwell.pool.client.batch import Batch
from stepwell.pool.client.call_batcher import CallBatcher
from stepwell.pool.client.exact_fill import ExactFill, fill
from stepwell.pool.client.fetching import fetch, settle
from stepwell.pool.client.ray_cluster import join_ray
from stepwell.pool.client.scoring import ScoringClient
from stepwell.pool.client.shards import PATIENCE, ShardSet
from stepwell.pool.client.watching import WatchClient
from stepwell.steps.columns import Columns, cut, pack, stack
from stepwell.steps.step import Step
from stepwell.steps.step_filter import make_step_filter

T = TypeVar("T")

VERSION_POLL = 30.0
CHECK_PATIENCE = 2.0
DELIVERY = 60.0
"""Seconds a batch that is acknowledged on arrival may take to arrive."""


class PoolClient:
    """Reaches every shard of one DataPool."""

    def __init__(self, name: str, namespace: str) -> None:
        self.shards = ShardSet(name, namespace)
        self._gathering = CallBatcher(self.shards)
        self._scoring = ScoringClient(self.shards)
        self._sight = WatchClient(self.shards)
        self._version = 0

    @property
    def policy_version(self) -> int:
        return self._version

    async def knows(self, trajectory_uid: str, prompt_uid: str) -> bool:
        known: bool = await self._gather(prompt_uid, "knows", trajectory_uid, prompt_uid)
        return known

    async def register_trajectory(self, wanted: Registration) -> None:
        await self._gather(wanted.prompt_uid, "register", wanted)

    async def submit_steps(
        self, steps: Sequence[Step], *, channel: str | None = None, group_size: int | None = None
    ) -> list[SubmitVerdict]:
        by_shard: dict[str, list[int]] = {}
        for i, step in enumerate(steps):
            by_shard.setdefault(await self.shards.owner(step.prompt_uid), []).append(i)

        async def submit(shard: str, places: list[int]) -> dict[int, SubmitVerdict]:
            message = pack([steps[i] for i in places])
            verdicts = await self.shards.ask(shard, "submit_steps", message, channel, group_size)
            return dict(zip(places, verdicts, strict=True))

        answers = await asyncio.gather(*(submit(shard, places) for shard, places in by_shard.items()))
        verdicts = {place: verdict for answer in answers for place, verdict in answer.items()}
        return [verdicts[i] for i in range(len(steps))]

    async def submit_groups(self, steps: Sequence[Step], registrations: Sequence[Registration]) -> list[SubmitVerdict]:
        return await self.submit_columns(pack(steps), registrations)

    async def submit_columns(self, columns: Columns, registrations: Sequence[Registration]) -> list[SubmitVerdict]:
        """One message a shard. Where all is one shard's, nothing is copied."""
        owners = {uid: await self.shards.owner(uid) for uid in dict.fromkeys(columns.prompt_uids)}
        runs = [(owner, len(list(run))) for owner, run in groupby(columns.prompt_uids, key=owners.__getitem__)]
        pieces = cut(columns, [size for _, size in runs]) if len(runs) > 1 else [columns]

        async def submit(shard: str) -> list[SubmitVerdict]:
            own = stack([piece for piece, (owner, _) in zip(pieces, runs, strict=True) if owner == shard])
            registered = [wanted for wanted in registrations if owners.get(wanted.prompt_uid) == shard]
            found: list[SubmitVerdict] = await self.shards.ask(shard, "submit_groups", own, registered)
            return found

        shards = list(dict.fromkeys(owner for owner, _ in runs))
        answers = dict(zip(shards, map(iter, await asyncio.gather(*map(submit, shards))), strict=True))
        return [next(answers[owners[uid]]) for uid in columns.prompt_uids]

    async def give_reward(self, reward: RewardGiven) -> bool:
        kept: bool = await self._ask_owner(reward.prompt_uid, "give_reward", reward)
        return kept

    async def take_unscored(self, count: int, *, lease: float, timeout: float) -> tuple[str, list[list[Step]]] | None:
        return await self._scoring.take(count, lease, timeout)

    async def give_judgements(self, judgements: Sequence[Judgement]) -> list[bool]:
        return await self._scoring.give(judgements)

    async def complete_trajectory(self, trajectory_uid: str, prompt_uid: str, reward: float | None) -> EndResult:
        ending: EndResult = await self._gather(prompt_uid, "complete", trajectory_uid, prompt_uid, reward)
        return ending

    async def abort_trajectory(self, trajectory_uid: str, prompt_uid: str) -> EndResult:
        ending: EndResult = await self._gather(prompt_uid, "abort", trajectory_uid, prompt_uid)
        return ending

    async def pacing(self, channel: str) -> Pacing:
        parts = await self.shards.ask_all("pacing", channel)
        return merge_pacing(parts, (await self.shards.plan()).limits.batch_size)

    async def fetch_batch(
        self, count: int, *, timeout: float = 60.0, lease: float | None = None, **terms: Unpack[BatchTerms]
    ) -> Batch:
        """Without a lease, the batch is acknowledged as soon as it has arrived here."""
        wanted = read_batch_request(count, **terms)
        batch = await fetch(self.shards, wanted, timeout, DELIVERY if lease is None else lease)
        if lease is None:
            await self.ack(batch)
        return batch

    async def fill_batch(
        self,
        trajectories: int,
        *,
        channel: str,
        shares: Mapping[str, float],
        lease: float,
        min_exactness: str = "retokenized",
        untrainable: bool = True,
    ) -> LeasedGroups | None:
        """The oldest groups with exactly that many trajectories, or nothing (shares: pool/rules/exact_batch.py)."""
        step_filter = make_step_filter(min_exactness, untrainable)
        wanted = ExactFill(
            trajectories=trajectories, channel=channel, shares=shares, lease=lease, step_filter=step_filter
        )
        return await fill(self.shards, wanted)

    async def backlog(self, channel: str) -> ReadyGroups:
        """The ready groups, by source and size."""
        return merge_ready_groups(await self.shards.ask_all("backlog", channel))

    async def clear(self, channel: str) -> int:
        """Drop every group that is not under lease; gives how many there were."""
        return sum(await self.shards.ask_all("clear", channel))

    async def ack(self, leased: HasLeases) -> None:
        """It was trained. LeaseExpired if it took too long, and some of it will be handed out again."""
        if await settle(self.shards, leased, "ack") is Settlement.EXPIRED:
            raise LeaseExpired("the lease was over before the batch was acknowledged; ask for a longer one")

    async def nack(self, leased: HasLeases) -> None:
        """It was not trained: it goes back to the head of the queue."""
        await settle(self.shards, leased, "nack")

    async def set_policy_version(self, version: int) -> None:
        await self.shards.ask_all("set_policy_version", version)
        self._version = version

    async def stats(self) -> PoolStats:
        return merge_stats(await self.shards.ask_all("stats"))

    async def series(self, *, seconds: float) -> TimeSeries:
        """What happened in the last so many seconds; the interval is finer for a short time than for a long one."""
        return await self._sight.series(seconds)

    async def changes(self, cursors: Mapping[str, Cursor], limit: int = 2_000) -> Changes:
        """Summaries of the trajectories that have changed, about so many at most; without cursors, of all."""
        return await self._sight.changes(cursors, limit)

    async def read(self, uids: Sequence[tuple[str, str]]) -> Columns:
        """The steps of those (trajectory_uid, prompt_uid), in order; nothing for what the pool no longer holds."""
        return await self._sight.read(uids)

    async def curate(self, curation: Curation) -> CurationOutcome:
        """What a person decides about a trajectory."""
        return await self._sight.curate(curation)

    async def audit(self, limit: int = 200, trajectory_uid: str | None = None) -> list[AuditEntry]:
        """The last decisions, newest first."""
        return await self._sight.audit(limit, trajectory_uid)

    async def quarantined(self) -> list[Step]:
        return [step for answer in await self.shards.ask_all("quarantined") for step in answer]

    async def check(self) -> None:
        await self.shards.ask(self.shards.pool, "policy_version", patience=CHECK_PATIENCE)
        await self.shards.ask_all("policy_version", patience=CHECK_PATIENCE)

    async def follow(self) -> None:
        """Keep `policy_version` fresh, until cancelled. A new version is known here as soon as the pool has it."""
        known: int | None = None
        while True:
            try:
                args = (known, VERSION_POLL)
                known = await self.shards.ask(
                    self.shards.pool, "policy_version", *args, patience=VERSION_POLL + PATIENCE
                )
                self._version = known or 0
            except PoolUnavailable:
                await asyncio.sleep(1.0)

    async def _gather(self, prompt_uid: str, method: str, *args: Any) -> Any:
        return await self._gathering.ask(await self.shards.owner(prompt_uid), method, *args)

    async def _ask_owner(self, prompt_uid: str, method: str, *args: Any) -> Any:
        return await self.shards.ask(await self.shards.owner(prompt_uid), method, *args)


class DataPool:
    """A DataPool for a training loop: plain calls, usable in scripts and notebooks alike."""

    def __init__(self, client: PoolClient) -> None:
        self._client = client
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="stepwell-pool", daemon=True).start()

    def fetch_batch(
        self, count: int, *, timeout: float = 60.0, lease: float | None = None, **terms: Unpack[BatchTerms]
    ) -> Batch:
        """The oldest ready groups (or trajectories, or steps), as soon as there are that many.

        FetchTimeout says what was still missing. With a `lease`, what is not acknowledged in so many seconds comes
        back; without, the batch is yours once it has arrived. The terms, all optional: `channel`, `unit` ("groups",
        "trajectories", "steps"), `order` ("oldest_ready", "strict"), `history` (the share drawn from what was trained),
        `min_exactness` ("engine", "submitted", "retokenized") and `untrainable` (also the steps marked so).
        """
        return self._run(self._client.fetch_batch(count, timeout=timeout, lease=lease, **terms))

    @contextmanager
    def batch(
        self, count: int, *, timeout: float = 60.0, lease: float = 600.0, **terms: Unpack[BatchTerms]
    ) -> Iterator[Batch]:
        """A batch to train on in a `with` block: acknowledged on leaving it, given back on an exception."""
        batch = self.fetch_batch(count, timeout=timeout, lease=lease, **terms)
        try:
            yield batch
        except BaseException:
            self.nack(batch)
            raise
        self.ack(batch)

    def ack(self, leased: HasLeases) -> None:
        """The batch was trained. LeaseExpired if that took too long: some of it will be handed out again."""
        self._run(self._client.ack(leased))

    def nack(self, leased: HasLeases) -> None:
        """The batch was not trained: it goes back to the head of the queue."""
        self._run(self._client.nack(leased))

    def give_reward(self, reward: RewardGiven) -> bool:
        """Score a trajectory or one of its steps, or score it anew.

        If it has already been handed out, the archive keeps the reward; False if there is none.
        """
        return self._run(self._client.give_reward(reward))

    def pacing(self, channel: str = TRAIN) -> Pacing:
        """How many new trajectories may start."""
        return self._run(self._client.pacing(channel))

    def set_policy_version(self, version: int) -> None:
        """Call it when the engines hold new weights: tokens sampled from now on carry this version."""
        self._run(self._client.set_policy_version(version))

    def stats(self) -> PoolStats:
        return self._run(self._client.stats())

    def curate(self, curation: Curation) -> CurationOutcome:
        """Mark, reject or relabel a trajectory; what is decided holds for every later batch."""
        return self._run(self._client.curate(curation))

    def audit(self, limit: int = 200, trajectory_uid: str | None = None) -> list[AuditEntry]:
        """What people decided about trajectories, newest first."""
        return self._run(self._client.audit(limit, trajectory_uid))

    def quarantined(self) -> list[Step]:
        """The last steps that were found unfit for training, each with its reason."""
        return self._run(self._client.quarantined())

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()


def connect(name: str = "data_pool", *, address: str = "auto", namespace: str = "default") -> DataPool:
    """Reach the DataPool of that name, joining the Ray cluster first if this process has not."""
    join_ray(address, namespace)
    return DataPool(PoolClient(name, namespace))
