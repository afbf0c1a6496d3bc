"""What an operator sees of the policy's versions, and decides, without a trainer."""

import pytest

from rig.asked import asked
from rig.local_pool import LocalPool
from rig.requested import requested
from stepwell.commands.policy import promote, roll_back, set_version, status_lines
from stepwell.errors import Conflict
from stepwell.pool.api.policy import Canary, PolicyAction, PolicyDecision, PolicyStatus, RewardTally
from stepwell.pool.slices.policy import ReportEngines

CANARY = Canary(7, ("http://new",), 0.1, began_at=1_000.0)
BEGUN = PolicyDecision(7, "canary", "guard", "validation 0.8, best 0.8", 1_000.0)


@pytest.fixture
async def pool() -> LocalPool:
    pool = LocalPool()
    await pool.decide(BEGUN, CANARY, 6)
    return pool


async def test_a_promoted_canary_gets_all_sessions_and_stays_the_canary(pool: LocalPool) -> None:
    assert await promote(pool, "ana", "it is fine") == "version 7 is promoted: its 1 engines serve all sessions"
    serving = await pool.newest_serving()
    assert (serving.policy_version, serving.canary) == (6, Canary(7, ("http://new",), 1.0, 1_000.0))
    *_, last = await pool.decisions()
    assert (last.version, last.action, last.by, last.reason) == (7, "promote", "ana", "it is fine")


async def test_a_rolled_back_canary_ends_and_is_not_promoted_later(pool: LocalPool) -> None:
    assert await roll_back(pool, "ana", "it is rude") == "version 7 is rolled back: all sessions get version 6"
    serving = await pool.newest_serving()
    assert (serving.canary, serving.withdrawn) == (None, (7,))
    for command in (promote, roll_back):
        with pytest.raises(Conflict, match="there is no canary: all sessions get version 6"):
            await command(pool, "ana", "again")
    assert [found.action for found in await pool.decisions()] == ["canary", "rollback"]


async def test_a_version_without_a_canary_is_allowed_for_a_guard_and_changes_nothing_else(pool: LocalPool) -> None:
    before = await pool.newest_serving()
    assert await promote(pool, "ana", "checked", 9) == (
        "version 9 is allowed: start the trainer, whose guard brings it to all engines"
    )
    serving = await pool.newest_serving()
    assert (serving.policy_version, serving.canary) == (before.policy_version, before.canary)
    assert await promote(pool, "ana", "it is fine", 7) == "version 7 is promoted: its 1 engines serve all sessions"
    await roll_back(pool, "ana", "it is rude")
    with pytest.raises(Conflict, match="version 7 was refused or rolled back"):
        await promote(pool, "ana", "again", 7)


async def test_an_operator_sets_a_version_that_an_engine_has_and_no_other(pool: LocalPool) -> None:
    shard = pool.transport.services["data_pool"]
    await requested(shard, "gateway")
    await asked(shard, ReportEngines("gateway", {"http://new": 0}))
    said = await set_version(pool, 0)
    assert said == "the policy has version 0: engines that report it, or a newer one, get calls within a second"
    assert (await pool.newest_serving()).policy_version == 0
    with pytest.raises(Conflict, match="no engine reports version 6: http://new has the weights that it was started"):
        await set_version(pool, 6)
    assert (await pool.newest_serving()).policy_version == 0


def test_the_list_says_what_serves_whom_and_why() -> None:
    status = PolicyStatus(
        policy_version=6,
        canary=CANARY,
        withdrawn=(3, 5),
        decisions=[PolicyDecision(5, "rollback", "guard", "worse", 0.0), BEGUN],
        rewards={6: RewardTally(1200, 300.0), 7: RewardTally(4, 3.0)},
        missing=("data_pool-1",),
    )
    assert list(status_lines(status, "train", last=1, now=1_061.0)) == [
        "stable    version 6 · 1,200 rewards in train, mean 0.250",
        "canary    version 7 · 10% of sessions, for 1 min 1 s · 4 rewards in train, mean 0.750",
        "          http://new",
        "withdrawn 3, 5",
        "missing   the rewards of data_pool-1, which does not answer",
        "1970-01-01 00:16:40 UTC  canary   version 7 by guard: validation 0.8, best 0.8",
    ]


@pytest.mark.parametrize(("last", "alarm"), [("overdue", "no decision after 10 min"), ("promote", None)])
def test_the_list_has_the_alarm_of_a_canary_without_a_decision(last: PolicyAction, alarm: str | None) -> None:
    of_another = PolicyDecision(6, "overdue", "guard", "another canary", 1_700.0)
    decisions = [BEGUN, PolicyDecision(7, last, "guard", "no decision after 10 min", 1_600.0), of_another]
    status = PolicyStatus(policy_version=6, canary=CANARY, decisions=decisions)
    assert status.alarm == alarm
    lines = list(status_lines(status, "train", last=0, now=1_661.0))
    assert [line for line in lines if line.startswith("alarm")] == ([] if alarm is None else [f"alarm     {alarm}"])


def test_the_list_of_a_pool_without_a_canary_is_short() -> None:
    status = PolicyStatus(policy_version=0, canary=None)
    assert list(status_lines(status, "train", last=0, now=0.0)) == [
        "stable    version 0 · no rewards in train",
        "canary    none",
    ]
