from collections import Counter
from dataclasses import replace

import pytest

from rig.dashboard import MadeUpPool
from stepwell.dashboard.gateway_monitor import GatewayMonitor
from stepwell.dashboard.metrics import ages_of, exposition, families
from stepwell.dashboard.queries import DashboardState
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.stats import ArchiveStats, ChannelStats, PoolStats, ScoringStats, SessionStats, StepCount

TRAIN = ChannelStats(
    groups=5,
    ready_groups=3,
    ready_by_source=Counter(),
    trajectories=40,
    nbytes=1_000,
    history_groups=0,
    held=StepCount(20, 2_000),
    accepted=StepCount(100, 10_000),
    shipped=StepCount(50, 5_000),
    dropped={"stale": StepCount(20, 2_500)},
    left_out={"greedy": StepCount(10, 500)},
)
STATS = PoolStats(
    policy_version=7,
    channels={"train": TRAIN, "validation": replace(TRAIN, groups=0)},
    submitted=107,
    refused=Counter({"late": 4}),
    quarantined=Counter({"logprob_count": 3}),
    in_grace=9,
    unfinished=3,
    uniform_groups=2,
    decided=Counter({"rollback": 5}),
    leases=2,
    short_of_disk=1,
    removal_waits=17,
    overdue_by_clock=18,
    forks=0,
    scoring=ScoringStats(waiting=6, under_way=1, resting=0, scored=30, failed=Counter({"timeout": 8}), late=0),
    archiving=ArchiveStats(waiting_bytes=11, failures=12, dropped_groups=13),
    sessions=SessionStats(open=14, ended_idle=15, deferred=16),
    missing=("data_pool-1",),
)


def told(stats: PoolStats | None, ages: dict[str, float] | None = None) -> dict[str, float]:
    """Every value, by its name and its labels' values."""
    found = (sample for family in families(stats, ages or {}) for sample in family.samples)
    return {" ".join((sample.name, *sample.labels.values())): sample.value for sample in found}


def test_every_figure_is_told_by_channel_and_cause() -> None:
    values = told(STATS, {"train": 30.0})
    expected = {
        "up": 1,
        "policy_version": 7,
        "missing_shards": 1,
        "archive_waiting_bytes": 11,
        "archive_failures": 12,
        "archive_dropped_groups": 13,
        "leases": 2,
        "shards_short_of_disk": 1,
        "shards_forgetting_waits": 17,
        "overdue_by_clock": 18,
        "uniform_groups": 2,
        "policy_decisions_total rollback": 5,
        "grace_steps": 9,
        "unfinished_rollouts": 3,
        "sessions_open": 14,
        "sessions_ended_idle": 15,
        "sessions_deferred": 16,
        "groups train": 5,
        "ready_groups train": 3,
        "trajectories train": 40,
        "bytes train": 1_000,
        "oldest_group_age_seconds train": 30,
        "accepted_steps_total train": 100,
        "accepted_tokens_total train": 10_000,
        "trained_steps_total train": 50,
        "trained_tokens_total train": 5_000,
        "wasted_steps_total train stale": 20,
        "wasted_tokens_total train stale": 2_500,
        "wasted_steps_total train left out: greedy": 10,
        "wasted_tokens_total train left out: greedy": 500,
        "refused_steps_total late": 4,
        "quarantined_steps_total logprob_count": 3,
        "scoring_waiting": 6,
        "scoring_failed_total timeout": 8,
    }
    of_train = {name: value for name, value in values.items() if " validation" not in name}
    assert of_train == {f"stepwell_pool_{name}": value for name, value in expected.items()}
    assert values["stepwell_pool_groups validation"] == 0


def test_what_was_accepted_is_held_trained_or_wasted() -> None:
    values = told(STATS)
    for what, held in (("steps", TRAIN.held.steps), ("tokens", TRAIN.held.tokens)):
        wasted = sum(value for name, value in values.items() if f"wasted_{what}_total train" in name)
        trained = values[f"stepwell_pool_trained_{what}_total train"]
        assert values[f"stepwell_pool_accepted_{what}_total train"] == held + trained + wasted


def test_of_a_pool_that_is_away_nothing_else_is_told() -> None:
    assert told(None) == {"stepwell_pool_up": 0}


def test_an_age_is_told_only_where_it_is_known() -> None:
    assert ages_of(STATS, {"train": 70.0}, now=100.0) == {"train": 30.0, "validation": 0.0}
    assert ages_of(STATS, {}, now=100.0) == {"validation": 0.0}, "its groups are not listed yet"
    assert ages_of(STATS, {"train": 101.0}, now=100.0)["train"] == 0.0, "clocks may differ"


@pytest.fixture
def pool() -> MadeUpPool:
    return MadeUpPool(trajectories=40)


@pytest.fixture
def state(pool: MadeUpPool) -> DashboardState:
    return DashboardState(pool, PoolPlan(), GatewayMonitor([], None), tokenizer=None)


async def test_ages_are_told_while_the_pool_is_followed(state: DashboardState) -> None:
    await state.follower.poll()
    assert b'oldest_group_age_seconds{channel="train"}' in (await exposition(state))[0]
    state.follower.error = "the pool is away"
    assert b'oldest_group_age_seconds{channel="train"}' not in (await exposition(state))[0]


async def test_scrapes_share_one_question(pool: MadeUpPool, state: DashboardState) -> None:
    for _ in range(5):
        body, content_type = await exposition(state)
    assert pool.calls == {"stats": 1}
    assert b"process_resident_memory_bytes" in body
    assert content_type.startswith("text/plain")
