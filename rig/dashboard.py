"""A pool to look at, in the test's own process: made-up rollouts, curation that is obeyed, and a switch that takes it
away.

    python -m rig.dashboard --port 8200 --trajectories 100000

serves the dashboard over it; new rollouts come every second.
"""

import argparse
import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import uvicorn
from fastapi import FastAPI

from rig.made_up_rollouts import SHARD, VERSIONS, RigTokenizer, columns_of, number_of, summary_of
from rig.waiting import until
from stepwell.access.access_keys import AccessKeys
from stepwell.access.audit_log import AuditLog
from stepwell.access.key_file import KeyFile
from stepwell.common.listening import served_hosts
from stepwell.dashboard.app import create_dashboard
from stepwell.dashboard.gateway_monitor import INTERVAL, GatewayMonitor
from stepwell.errors import PoolUnavailable
from stepwell.pool.api.leasing import LATER, BatchPreview, BatchRequest, PreviewItem
from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.api.policy import Canary, PolicyDecision, PolicyStatus, RewardTally
from stepwell.pool.api.stats import ChannelSeries, ChannelStats, PoolStats, ScoringStats, StepCount, TimeSeries
from stepwell.pool.api.watching import Changes, Cursor, TrajectorySnapshot, TrajectoryState
from stepwell.pool.client import PoolClient
from stepwell.pool.client.in_process import InProcessTransport
from stepwell.pool.slices.curation import AuditEntry, AuditPage, Curation, CurationAction, CurationOutcome
from stepwell.steps.columns import Columns

GONE = (TrajectoryState.TRAINED, TrajectoryState.DROPPED)
QUEUED = (TrajectoryState.OPEN, TrajectoryState.WAITING, TrajectoryState.READY)
PREVIEWED_GROUPS = 6
"""For so many the made-up trainer asked last."""
HELD = tuple(state for state in TrajectoryState if state not in GONE)


class MadeUpPool(PoolClient):
    """No shard is behind it. Rollout number n is what rig/made_up_rollouts.py makes of it, as changed by
    curation."""

    def __init__(self, trajectories: int = 200) -> None:
        super().__init__("data_pool", transport=InProcessTransport({}))
        self.away = False
        self.calls: Counter[str] = Counter()
        """How often it was asked what."""
        self.rows: dict[str, TrajectorySnapshot] = {}
        self.entries: list[AuditEntry] = []
        self.recent: Counter[str] = Counter()
        """The last steps of each channel by what in their sampling keeps them from training."""
        self._epoch = 0
        self._told: list[str] = []
        self._last_told: dict[str, int] = {}
        began = time.time() - trajectories / 4
        for number in range(trajectories):
            self.put(summary_of(number, began))

    def put(self, row: TrajectorySnapshot) -> None:
        self.rows[row.trajectory_uid] = row
        self._last_told[row.trajectory_uid] = len(self._told)
        self._told.append(row.trajectory_uid)

    def grow(self, count: int = 4) -> None:
        """More rollouts, begun now."""
        for number in range(len(self.rows), len(self.rows) + count):
            self.put(summary_of(number)._replace(started_at=time.time(), changed_at=time.time()))

    def restart(self, *, keeping: int) -> None:
        """As a shard does that comes back, with its first so many rollouts only."""
        kept = list(self.rows.values())[:keeping]
        self._epoch += 1
        self.rows, self._told, self._last_told = {}, [], {}
        for row in kept:
            self.put(row)

    async def check(self) -> None:
        await asyncio.sleep(0)
        if self.away:
            raise PoolUnavailable("the pool is away")

    async def stats(self) -> PoolStats:
        await self._asked("stats")
        channels = sorted({row.channel for row in self.rows.values()})
        return PoolStats(
            policy_version=VERSIONS,
            channels={name: self._channel(name) for name in channels},
            submitted=len(self.rows) + 7,
            refused=Counter({"duplicate": 4, "late": 1}),
            quarantined=Counter({"logprob_count": 2}),
            in_grace=0,
            uniform_groups=0,
            leases=1,
            forks=3,
            scoring=ScoringStats(waiting=2, under_way=1, resting=0, scored=11, failed=Counter({"timeout": 1}), late=0),
        )

    async def policy_status(self, channel: str = "train") -> PolicyStatus:
        await self._asked("policy_status")
        began = time.time() - 90
        return PolicyStatus(
            policy_version=VERSIONS,
            canary=Canary(VERSIONS + 2, ("http://canary:8000",), 0.1, began),
            withdrawn=(VERSIONS + 1,),
            decisions=[
                PolicyDecision(VERSIONS + 1, "rollback", "guard", "worse by 0.4 after 30 rewards", began - 600),
                PolicyDecision(VERSIONS + 2, "canary", "guard", "validation 0.81", began),
                PolicyDecision(VERSIONS + 2, "overdue", "guard", "no decision after 1 min", began + 60),
            ],
            rewards={VERSIONS: RewardTally(400, 300.0), VERSIONS + 2: RewardTally(40, 32.0)},
        )

    async def series(self, *, seconds: float) -> TimeSeries:
        await self._asked("series")
        interval = 5.0 if seconds <= 3600 else 60.0
        count = int(seconds // interval)
        last = time.time() // interval * interval
        ends = [last - interval * (count - 1 - n) for n in range(count)]
        return TimeSeries(
            interval=interval, ends=ends, channels={name: _window(ends, name) for name in ("train", "validation")}
        )

    async def changes(self, cursors: Mapping[str, Cursor], limit: int = 2_000) -> Changes:
        await self._asked("changes")
        cursor, epoch = cursors.get(SHARD, Cursor()), str(self._epoch)
        start = cursor.position if cursor.epoch == epoch else 0
        fresh = (at for at in range(start, len(self._told)) if self._last_told[self._told[at]] == at)
        places = list(itertools.islice(fresh, limit))
        end = places[-1] + 1 if len(places) == limit else len(self._told)
        return Changes(
            snapshots=[self.rows[self._told[at]] for at in places],
            cursors={SHARD: Cursor(epoch=epoch, position=end)},
            reset_shards=() if cursor.epoch == epoch else (SHARD,),
            more=end < len(self._told),
        )

    async def preview(self, channel: str) -> BatchPreview:
        await self._asked("preview")
        held = [row for row in self.rows.values() if row.channel == channel and row.state in QUEUED]
        groups = [list(rows) for _, rows in itertools.groupby(held, key=lambda row: row.group)]
        ready = [_previewed(rows) for rows in groups if rows[0].state is TrajectoryState.READY]
        unready = [
            _previewed(rows, why="2 of 4 rollouts are complete, 2 running")
            for rows in groups
            if rows[0].state is not TrajectoryState.READY
        ]
        late = [replace(item, why=LATER) for item in ready[PREVIEWED_GROUPS:]]
        return BatchPreview(
            request=BatchRequest(count=PREVIEWED_GROUPS, channel=channel),
            asked_at=time.time() - 12,
            items=ready[:PREVIEWED_GROUPS],
            is_complete=len(ready) >= PREVIEWED_GROUPS,
            waiting=sorted([*unready, *late], key=lambda item: item.group)[:20],
            waits_for="" if len(ready) >= PREVIEWED_GROUPS else f"{PREVIEWED_GROUPS} ready groups; {len(ready)} ready",
        )

    async def read(self, uids: Sequence[tuple[str, str]]) -> Columns:
        await self._asked("read")
        held = [uid for uid, _ in uids if uid in self.rows and self.rows[uid].state is not TrajectoryState.DROPPED]
        return columns_of([number_of(uid) for uid in held])

    async def curate(self, curation: Curation) -> CurationOutcome:
        await self._asked("curate")
        row = self.rows.get(curation.trajectory_uid)
        outcome, changed = (CurationOutcome.UNKNOWN, None) if row is None else _decided(row, curation)
        if changed is not None:
            self.put(changed._replace(changed_at=time.time()))
        entry = AuditEntry(
            at=time.time(),
            by=curation.by,
            action=curation.action,
            trajectory_uid=curation.trajectory_uid,
            prompt_uid=curation.prompt_uid,
            outcome=outcome,
            before="" if row is None else _described(row, curation.action),
            after="" if changed is None else _described(changed, curation.action),
            why=curation.why,
        )
        self.entries.insert(0, entry)
        return outcome

    async def audit(self, limit: int = 200, trajectory_uid: str | None = None) -> AuditPage:
        await self._asked("audit")
        return AuditPage([entry for entry in self.entries if trajectory_uid in (None, entry.trajectory_uid)][:limit])

    async def _asked(self, what: str) -> None:
        self.calls[what] += 1
        await self.check()

    def _channel(self, name: str) -> ChannelStats:
        rows = [row for row in self.rows.values() if row.channel == name]

        def tally(*states: TrajectoryState) -> StepCount:
            of = [row for row in rows if row.state in states]
            return StepCount(sum(row.steps for row in of), sum(row.tokens for row in of))

        held = [row for row in rows if row.state in HELD]
        ready = {row.group for row in rows if row.state is TrajectoryState.READY}
        return ChannelStats(
            groups=len({row.group for row in held}),
            ready_groups=len(ready),
            ready_by_source=Counter(),
            trajectories=len(held),
            nbytes=sum(row.tokens for row in held) * 8,
            history_groups=0,
            held=tally(*HELD),
            accepted=tally(*TrajectoryState),
            shipped=tally(TrajectoryState.TRAINED),
            dropped={"stale": tally(TrajectoryState.DROPPED)},
            left_out={"greedy": StepCount(3, 450)} if name == "train" else {},
            recent=self.recent,
        )


def _previewed(rows: Sequence[TrajectorySnapshot], why: str = "") -> PreviewItem:
    first, oldest = rows[0], min(row.oldest_version or 0 for row in rows)
    return PreviewItem(
        prompt_uid=first.prompt_uid,
        group=first.group,
        age=first.group,
        opened_at=first.started_at,
        source=first.source,
        user="",
        size=first.group_size,
        trajectories=tuple(row.trajectory_uid for row in rows),
        rewards=tuple(row.reward for row in rows),
        steps=sum(row.steps for row in rows),
        oldest_version=oldest,
        behind=max(0, VERSIONS - oldest),
        why=why,
        shard=SHARD,
    )


def _decided(row: TrajectorySnapshot, wanted: Curation) -> tuple[CurationOutcome, TrajectorySnapshot | None]:
    """What becomes of it, and the row as it is then."""
    if wanted.action in (CurationAction.MARK, CurationAction.UNMARK):
        others = tuple(mark for mark in row.marks if mark != wanted.mark)
        changed = row._replace(marks=(*others, wanted.mark) if wanted.action is CurationAction.MARK else others)
    elif row.state in GONE:
        return CurationOutcome.LATE, None
    elif wanted.action is CurationAction.REJECT:
        changed = row._replace(state=TrajectoryState.DROPPED, cause="rejected", note=f"by {wanted.by}: {wanted.why}")
    else:
        changed = row._replace(reward=wanted.reward, reward_source=f"curation:{wanted.by}")
    return (CurationOutcome.UNCHANGED, None) if changed == row else (CurationOutcome.DONE, changed)


def _described(row: TrajectorySnapshot, action: CurationAction) -> str:
    if action is CurationAction.REJECT:
        return row.state
    return str(row.reward) if action is CurationAction.RELABEL else ", ".join(row.marks)


def _window(ends: Sequence[float], name: str) -> ChannelSeries:
    waves = [math.sin(end / 120) for end in ends]
    scale = 1.0 if name == "train" else 0.2
    mean = [round(0.5 + 0.2 * wave, 3) for wave in waves]
    return ChannelSeries(
        steps=[int(scale * (60 + 30 * wave)) for wave in waves],
        tokens=[int(scale * (9000 + 4000 * wave)) for wave in waves],
        trained_steps=[int(scale * (50 + 20 * wave)) for wave in waves],
        trained_tokens=[int(scale * (8000 + 3000 * wave)) for wave in waves],
        rewards=[20 for _ in waves],
        reward_mean=mean,
        reward_low=[value - 0.3 for value in mean],
        reward_high=[value + 0.3 for value in mean],
        staleness=[{0: 10, 1: 6, 2: 3, 5: 1} for _ in waves],
        groups=[int(scale * (200 + 50 * wave)) for wave in waves],
        ready_groups=[int(scale * (100 + 40 * wave)) for wave in waves],
        oldest_age=[30 + 10 * wave for wave in waves],
        dropped_tokens={
            "stale": [int(300 + 200 * wave) for wave in waves],
            "aborted": [100 for _ in waves],
            "left out: greedy": [50 for _ in waves],
        },
    )


def make_dashboard(
    pool: Any,
    *,
    control_keys: Sequence[str] = (),
    issued: KeyFile | None = None,
    audit: AuditLog | None = None,
    tokenizer: Any = None,
    gateways: Sequence[str] = (),
    gateway_interval: float = INTERVAL,
    login: Any = None,
) -> FastAPI:
    return create_dashboard(
        pool=pool,
        keys=AccessKeys(control_keys, issued),
        audit=audit,
        plan=PoolPlan(journal="/journal", limits=Limits(group_size=4, max_staleness=2)),
        tokenizer=tokenizer,
        gateways=GatewayMonitor(gateways, control_keys[0] if control_keys else None, interval=gateway_interval),
        hosts=served_hosts("127.0.0.1", (), has_keys=bool(control_keys)),
        login=login,
    )


@asynccontextmanager
async def serve_dashboard(pool: Any, **how: Any) -> AsyncIterator[str]:
    """A dashboard on a free loopback port; gives its URL. With the rig's tokenizer, unless told otherwise."""
    app = make_dashboard(pool, **{"tokenizer": RigTokenizer(), **how})
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", access_log=False))
    serving = asyncio.create_task(server.serve())
    try:
        await until(lambda: server.started or serving.done(), "the dashboard to start")
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


async def _serve(port: int, trajectories: int, keys: Sequence[str], gateways: Sequence[str]) -> None:
    pool = MadeUpPool(trajectories)
    app = make_dashboard(pool, control_keys=keys, tokenizer=RigTokenizer(), gateways=gateways)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", access_log=False))

    async def grow() -> None:
        while True:
            await asyncio.sleep(1)
            pool.grow()

    growing = asyncio.create_task(grow())
    await server.serve()
    growing.cancel()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8200)
    parser.add_argument("--trajectories", type=int, default=2_000)
    parser.add_argument("--key", action="append", default=[])
    parser.add_argument("--gateway", action="append", default=[])
    given = parser.parse_args()
    asyncio.run(_serve(given.port, given.trajectories, given.key, given.gateway))
