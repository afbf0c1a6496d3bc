"""`stepwell policy list | set | promote | rollback`: an operator looks at the policy's versions, and decides for the
guard.

- The commands talk to the pool alone: they work while the trainer is down.
- Promotions and rollbacks are kept as the guard's decisions are.
"""

import asyncio
import getpass
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Annotated

from pydantic import Field
from pydantic_settings import CliPositionalArg

from stepwell.commands.sections import PoolSection, join_pool
from stepwell.common.command_line import say
from stepwell.errors import Conflict
from stepwell.pool.api.policy import Canary, PolicyDecision, PolicyStatus, RewardTally
from stepwell.pool.client import PoolClient

NO_CANARY = "there is no canary: all sessions get version {version}"


class PolicyListSettings(PoolSection, env_prefix="STEPWELL_POLICY_"):
    """Show which version of the policy serves which sessions, what the versions earned, and the last decisions."""

    examples = ("stepwell policy list",)

    channel: str = "train"
    """Channel whose rewards are shown."""
    last: int = Field(default=10, ge=0)
    """How many decisions to show."""
    as_json: bool = Field(default=False, alias="json")
    """Print it as JSON."""


class PolicySetSettings(PoolSection, env_prefix="STEPWELL_POLICY_"):
    """Set the version of the policy to one that an engine reports; 0 are the weights that engines were started with. A
    WeightSync sets versions by itself: this command is for a pool whose version no engine has, as after a restart of
    the engines without the trainer. Others are refused.
    """

    examples = ("stepwell policy set 0",)

    version: CliPositionalArg[Annotated[int, Field(ge=0)]]
    """The version that sessions get from now on."""


class PolicyDecisionSection(PoolSection, env_prefix="STEPWELL_POLICY_"):
    reason: str = "an operator's decision"
    """Why, in words. It is kept with the decision."""
    by: str = ""
    """Who decides; by default the name of this user."""


class PromoteSettings(PolicyDecisionSection):
    """Give the canary to all sessions at once, without waiting for the guard. Its engines serve them from now on; the
    guard brings the version to the other engines when the trainer runs. The trainer need not run for this command.
    """

    examples = ('stepwell policy promote --reason "reviewed by hand"',)

    version: int | None = Field(default=None, ge=0)
    """The version of a trainer whose guard has lost its folder: it may begin with it, at all engines. Without it, the
    canary is promoted."""


class RollbackSettings(PolicyDecisionSection):
    """End the canary at once. All sessions go to the other engines, its engines get no calls until they have other
    weights, and what it said is not trained. The trainer need not run for this command.
    """

    examples = ('stepwell policy rollback --reason "users complain about the tone"',)


def run_list(settings: PolicyListSettings) -> None:
    status = asyncio.run(join_pool(settings).policy_status(settings.channel))
    if settings.as_json:
        shown = json.dumps(asdict(status), indent=2)
    else:
        shown = "\n".join(status_lines(status, settings.channel, settings.last, time.time()))
    say(shown)


def run_set(settings: PolicySetSettings) -> None:
    say(asyncio.run(set_version(join_pool(settings), settings.version)))


def run_promote(settings: PromoteSettings) -> None:
    say(asyncio.run(promote(join_pool(settings), _who(settings), settings.reason, settings.version)))


def run_rollback(settings: RollbackSettings) -> None:
    say(asyncio.run(roll_back(join_pool(settings), _who(settings), settings.reason)))


async def set_version(pool: PoolClient, version: int) -> str:
    """Returns what has happened, in words. Conflict if no engine reports the version."""
    await pool.set_policy_version(version)
    return f"the policy has version {version}: engines that report it, or a newer one, get calls within a second"


async def promote(pool: PoolClient, by: str, reason: str, version: int | None = None) -> str:
    """Returns what has happened, in words. Conflict if there is no canary, unless `version` names one without it."""
    known = (await pool.newest_serving()).canary
    if version is not None and (known is None or known.version != version):
        await pool.decide(PolicyDecision(version, "promote", by, reason, time.time()), known)
        return f"version {version} is allowed: start the trainer, whose guard brings it to all engines"
    canary = await _canary(pool)
    decision = PolicyDecision(canary.version, "promote", by, reason, time.time())
    await pool.decide(decision, replace(canary, share=1.0))
    return f"version {canary.version} is promoted: its {len(canary.engines)} engines serve all sessions"


async def roll_back(pool: PoolClient, by: str, reason: str) -> str:
    """Returns what has happened, in words. Conflict if there is no canary."""
    canary = await _canary(pool)
    await pool.decide(PolicyDecision(canary.version, "rollback", by, reason, time.time()))
    return f"version {canary.version} is rolled back: all sessions get version {pool.policy_version}"


def status_lines(status: PolicyStatus, channel: str, last: int, now: float) -> Iterator[str]:
    canary, stable = status.canary, status.policy_version
    yield f"stable    version {stable} · {_earned(status.rewards.get(stable), channel)}"
    if canary is None:
        yield "canary    none"
    else:
        earned = _earned(status.rewards.get(canary.version), channel)
        served = f"{canary.share:.0%} of sessions, {_age(now - canary.began_at)}"
        yield f"canary    version {canary.version} · {served} · {earned}"
        yield from (f"          {engine}" for engine in canary.engines)
    if status.alarm is not None:
        yield f"alarm     {status.alarm}"
    if status.withdrawn:
        yield f"withdrawn {', '.join(map(str, status.withdrawn[-10:]))}"
    if status.missing:
        yield f"missing   the rewards of {', '.join(status.missing)}, which does not answer"
    for decision in list(status.decisions)[-last:] if last else []:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(decision.at))
        yield f"{at} UTC  {decision.action:8} version {decision.version} by {decision.by}: {decision.reason}"


def _earned(tally: RewardTally | None, channel: str) -> str:
    if tally is None or tally.mean is None:
        return f"no rewards in {channel}"
    return f"{tally.count:,} rewards in {channel}, mean {tally.mean:.3f}"


def _age(seconds: float) -> str:
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"for {hours} h {minutes} min" if hours else f"for {minutes} min {rest} s"


async def _canary(pool: PoolClient) -> Canary:
    serving = await pool.newest_serving()
    if serving.canary is None:
        raise Conflict(NO_CANARY.format(version=serving.policy_version))
    return serving.canary


def _who(settings: PolicyDecisionSection) -> str:
    return settings.by or getpass.getuser()
