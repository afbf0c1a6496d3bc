"""A part of the calls is cut, times out or is answered with 503, and the agents make them again at another gateway.

Proxies between agents and gateways, and between gateways and engines, break 5 % of the calls in all. Every answer is a
text of its own. What is trained is compared with what was read: once with an Idempotency-Key on each request, once with
nothing but the count of tries that the SDKs send. Without keys the pool cannot know of an answer that it has handed
over in whole whether it was read: such answers are broken as rarely as at random moments, and counted.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from benchmarks.survival.breaking_proxy import BEFORE_THE_END, HANDED_OVER, Break, BreakingProxy, shuffled
from benchmarks.survival.cluster import survival_cluster
from benchmarks.survival.retrying_agents import RetryingAgents, answer_uniquely
from benchmarks.survival.row import RowOutcome
from benchmarks.survival.text_trainer import all_trained, text_trainer

GATEWAYS, SHARDS, ENGINES = 4, 2, 2
AGENTS, CALLS = 24, 5
SHARE = 0.025
"""Of the calls, that each of the two rows of proxies breaks."""
TIMEOUT = 4.0
"""Seconds after which an agent gives up a call."""
RARE = 49
"""Without keys, so many breaks before the end come on one after it, between agents and gateways."""
MOST_DIFFER = 0.1
"""Percent, without keys."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Answers: those that agents have read, and those that were trained."""

    read: Counter[str]
    trained: Counter[str]
    handed_over: set[str]
    """The last byte of these was handed over by a gateway."""

    def figures(self, name: str) -> dict[str, float]:
        more, fewer = self.trained - self.read, self.read - self.trained
        differ = more.total() + fewer.total()
        handed_over = sum(count for text, count in more.items() if text in self.handed_over)
        figures = {
            "read": self.read.total(),
            "trained": self.trained.total(),
            "not_read": more.total(),
            "not_trained": fewer.total(),
            "handed_over": handed_over,
            "others_differ": differ - handed_over,
            "differ_percent": round(100 * differ / max(1, self.read.total()), 3),
        }
        return {f"{name}_{figure}": value for figure, value in figures.items()}


class RetriedCalls:
    name = "retries"
    fault = "5 % of 10,000 calls cut, timed out or 503, and made again at another of 4 gateways; with and without keys"

    async def run(self, *, quick: bool) -> RowOutcome:
        rollouts = 90 if quick else 2_000
        figures = {**await _run(rollouts, has_keys=True), **await _run(rollouts, has_keys=False)}
        none = ("not_read", "not_trained", "unanswered")
        most: dict[str, float] = {f"keys_{figure}": 0 for figure in none}
        most |= {"no_keys_others_differ": 0, "no_keys_not_trained": 0, "no_keys_unanswered": 0}
        if not quick:  # where one answer is more than that
            most["no_keys_differ_percent"] = MOST_DIFFER
        return RowOutcome(figures, most, {f"{name}_read": rollouts * CALLS for name in ("keys", "no_keys")})


async def _run(rollouts: int, *, has_keys: bool) -> dict[str, float]:
    name, chance = "keys" if has_keys else "no_keys", random.Random(rollouts)
    rare = () if has_keys else BEFORE_THE_END * (RARE - 1)
    breaks = {"agents": (*BEFORE_THE_END, *HANDED_OVER, *rare), "engines": tuple(Break)}
    async with AsyncExitStack() as stack:

        async def proxies(of: str, number: int) -> list[BreakingProxy]:
            dealt = shuffled(breaks[of], chance)
            made = [BreakingProxy(dealt, SHARE, TIMEOUT + 1, chance) for _ in range(number)]
            return [await stack.enter_async_context(proxy) for proxy in made]

        to_engines, to_gateways = await proxies("engines", ENGINES), await proxies("agents", GATEWAYS)
        flags = {"vllm_addresses": ",".join(proxy.url for proxy in to_engines)}
        cluster = await stack.enter_async_context(
            survival_cluster(gateways=0, shards=SHARDS, gateway_flags=flags),
        )
        answer_uniquely(cluster.engine)
        for proxy in to_engines:
            proxy.server = cluster.engine.url
        for proxy in to_gateways:
            await asyncio.to_thread(cluster.fleet.add)
            proxy.server = cluster.urls[-1]
        agents = RetryingAgents([proxy.url for proxy in to_gateways], has_keys, TIMEOUT, (CALLS, CALLS))
        with text_trainer(cluster) as file:
            await agents.run(AGENTS, rollouts)
            trained = await all_trained(cluster, file)
        left_out = (await cluster.pool.stats()).channels["train"].left_out
    broken = sum((proxy.broken for proxy in (*to_engines, *to_gateways)), Counter[Break]())
    print(f"{name}: broken: {_shown(broken)}; left out: {_shown({kind: n.steps for kind, n in left_out.items()})}")
    compared = Compared(
        Counter(text for texts in agents.read.values() for text in texts),
        Counter(text for texts in trained.values() for text in texts),
        set().union(*(proxy.whole for proxy in to_gateways)),
    )
    gateways = [relayed for proxy in to_gateways for relayed in proxy.unusual]
    for uid in [uid for uid, texts in trained.items() if Counter(texts) != Counter(agents.read[uid])]:
        print(f"{name}: {uid}: read {agents.read[uid]}, trained {trained[uid]}")
        for relayed in [relayed for relayed in gateways if uid in relayed.path]:
            print(f"  {relayed}")
    counted = {"broken": broken.total(), "asked": agents.asked, "unanswered": agents.unanswered}
    return compared.figures(name) | {f"{name}_{figure}": value for figure, value in counted.items()}


def _shown(counts: Mapping[Any, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"
