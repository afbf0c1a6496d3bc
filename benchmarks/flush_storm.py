"""What a pause of a shard costs among 200 gateways and 100 shards: idle messages, and how long completions are slow.

One of the shards is simulated: a queue of messages, of which each takes the shard's time. That time is measured first,
with a real shard: of a message, and of one more operation in it. The load is that of 200 gateways (docs/operations/
scaling.md, "Size a deployment"), and a share of the rollouts is served by two of them.

- As it is: a shard knows the holders of each rollout at all times, for which a message announces each call. While
  there are calls, each gateway shows itself every 0.75 s; a completion asks the holders, and calls the gateways whose
  word the shard lacks. While there are none, gateways wait for the question of their machine's link.
- `--polled`, as it was in 0.2: each gateway polls the shard for what it has to flush. A gateway that was not heard for
  a while may have served any rollout, and a completion then asks them all, with one message for each rollout.

What is left out: a rollout that waits for flushes costs nothing while it waits, messages need no time on their way, and
what several gateways of a machine send at the same time is not one message.

    python -m benchmarks.flush_storm
    python -m benchmarks.flush_storm --polled
"""

import argparse
import asyncio
import heapq
import random
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from rig.ray_cluster import RayCluster, start_ray  # isort: skip # sets Ray's environment, so it comes before Ray

from stepwell.pool.actors import start_pool
from stepwell.pool.slices.producing import ChannelIfOpen

from benchmarks.gateway_rig.ours import pid_of_shard
from benchmarks.gateway_rig.processes import exact_cpu_seconds
from benchmarks.report import report
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.producing import FLUSH_WAIT, Registration
from stepwell.pool.client import PoolClient
from stepwell.pool.client.shards import NEWS_WAIT
from stepwell.pool.shard.gateway_roster import GAP, IDLE_PAUSE, SHOW_PAUSE

GATEWAYS, SHARDS, MACHINES = 200, 100, 50
AGENTS_PER_GATEWAY = 10_000 / 17
CALL_INTERVAL, CALLS = 20.0, 10
"""Seconds between two calls of an agent, and calls of a rollout."""
SHARED = 0.1
"""The share of the rollouts that two gateways serve."""
POLL = 1.0
"""Seconds of a poll in 0.2."""
PAUSE, WARM_UP, OBSERVED = 2.0, 30.0, 60.0
SLOW = 2.0
"""Seconds of a completion from which on the shard has not recovered."""
RETRY_PAUSE = 0.5
ASK_AGAIN = 1.0
"""Seconds after which a shard asks again for what was not flushed."""
LOOK_INTERVAL = 0.1
"""Seconds for which the simulation keeps who is silent."""
MANY, AT_ONCE = 40, 16
MOST_EVENTS = 3_000_000
"""A storm that makes more does not end."""
NEVER = 1e9


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a shard."""

    message: float
    operation: float


@dataclass(slots=True, eq=False)
class Rollout:
    gateway: int
    """Which serves it, and asks for its completion."""
    holders: set[int]
    """The gateways that may hold steps of it."""
    asked_at: float | None = None
    """When its completion was first asked for."""
    deadline: float = 0.0


@dataclass(slots=True)
class Simulation:
    """In virtual time. Subclasses are the protocols by which gateways are asked."""

    costs: Costs
    agents: int
    now: float = 0.0
    messages: int = 0
    failed: int = 0
    """Completions that were answered with 503."""
    ended: list[tuple[float, float]] = field(default_factory=list)
    """When a completion was answered, and how long it took."""
    open: set[Rollout] = field(default_factory=set)
    chance: random.Random = field(default_factory=lambda: random.Random(1))
    heard_at: dict[int, float] = field(default_factory=dict)
    """By gateway."""
    asked: dict[int, set[Rollout]] = field(default_factory=lambda: defaultdict(set))
    flushing: set[tuple[int, Rollout]] = field(default_factory=set)
    _free_at: float = 0.0
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _numbers: "count[int]" = field(default_factory=count)
    _silent_then: set[int] = field(default_factory=set)
    _looked_at: float = 0.0

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        for events in count():
            if not self._events or self._events[0][0] > end or events > MOST_EVENTS:
                break
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = end

    def start(self) -> None:
        self.start_gateways()
        for _ in range(self.agents):
            rollout = self._opened()
            self.at(self.chance.random() * CALL_INTERVAL, partial(self._call, rollout, self.chance.randrange(CALLS)))

    def start_gateways(self) -> None:
        raise NotImplementedError

    def begin_call(self) -> None:
        """A call of an agent has begun."""

    def ask(self, gateway: int, rollout: Rollout) -> None:
        """The gateway may hold steps of the rollout."""
        raise NotImplementedError

    def pause(self, seconds: float) -> None:
        self._free_at = max(self._free_at, self.now) + seconds

    def recovery(self, paused_until: float) -> float:
        """Seconds until the last completion was answered that took too long; NEVER if some are not answered."""
        if any(rollout.asked_at is not None and self.now - rollout.asked_at > SLOW for rollout in self.open):
            return NEVER
        return max([0.0, *(at - paused_until for at, took in self.ended if took > SLOW)])

    def at(self, delay: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._numbers), event))

    def send(self, operations: int, handle: Callable[[], None]) -> None:
        self.messages += 1
        self._free_at = max(self._free_at, self.now) + self.costs.message + operations * self.costs.operation
        self.at(self._free_at - self.now, handle)

    # -- rollouts ------------------------------------------------------------------------------------------------------

    def _opened(self) -> Rollout:
        served_by = {self.chance.randrange(GATEWAYS)}
        gateway = min(served_by)
        if self.chance.random() < SHARED:
            served_by.add(self.chance.randrange(GATEWAYS))
        rollout = Rollout(gateway, served_by)
        self.open.add(rollout)
        return rollout

    def _call(self, rollout: Rollout, calls_left: int) -> None:
        if calls_left:
            self.begin_call()
            self.send(1, lambda: None)  # the step
            self.at(CALL_INTERVAL, lambda: self._call(rollout, calls_left - 1))
            return
        rollout.asked_at = self.now if rollout.asked_at is None else rollout.asked_at
        self.send(1, lambda: self._complete(rollout))

    def _complete(self, rollout: Rollout) -> None:
        rollout.deadline = self.now + FLUSH_WAIT
        if self._holders(rollout):
            self.send(1, lambda: self._await_flushes(rollout))
        else:
            self._end(rollout)

    def _await_flushes(self, rollout: Rollout) -> None:
        holders = self._holders(rollout) if rollout in self.open else ()
        if not holders:
            self._end(rollout)
        elif self.now > rollout.deadline:
            self.failed += 1
            self.at(RETRY_PAUSE, lambda: self._call(rollout, 0))
        else:
            for holder in holders:
                self.ask(holder, rollout)
            self.at(ASK_AGAIN, lambda: self._await_flushes(rollout))

    def _end(self, rollout: Rollout) -> None:
        if rollout in self.open and rollout.asked_at is not None:
            self.open.remove(rollout)
            self.ended.append((self.now, self.now - rollout.asked_at))
            new = self._opened()  # the agent's next one
            self.send(1, lambda: None)
            self.at(CALL_INTERVAL, lambda: self._call(new, CALLS))

    # -- flushes -------------------------------------------------------------------------------------------------------

    def _holders(self, rollout: Rollout) -> set[int]:
        return (rollout.holders | self._silent()) - {rollout.gateway}

    def _silent(self) -> set[int]:
        """The gateways that may serve any rollout, because they were not heard for a while."""
        if self.now >= self._looked_at + LOOK_INTERVAL:
            self._looked_at = self.now
            self._silent_then = {gateway for gateway, at in self.heard_at.items() if self.now - at > GAP}
        return self._silent_then

    def hear(self, gateway: int, at: float) -> None:
        self.heard_at[gateway] = at
        self._silent_then.discard(gateway)

    def flush(self, gateway: int) -> None:
        """It sends what it was asked for, one message for each rollout."""
        for rollout in [one for one in self.asked.pop(gateway, ()) if (gateway, one) not in self.flushing]:
            self.flushing.add((gateway, rollout))
            self.send(1, partial(self._flushed, gateway, rollout))

    def _flushed(self, gateway: int, rollout: Rollout) -> None:
        self.flushing.discard((gateway, rollout))
        rollout.holders.discard(gateway)
        if rollout.deadline and not self._holders(rollout):
            self._end(rollout)


@dataclass(slots=True)
class Polled(Simulation):
    _waiting: dict[int, int] = field(default_factory=dict)
    """The polls that wait, with their numbers."""

    def start_gateways(self) -> None:
        for gateway in range(GATEWAYS):
            self.at(self.chance.random(), partial(self.send, 1, partial(self._poll, gateway)))

    def ask(self, gateway: int, rollout: Rollout) -> None:
        self.asked[gateway].add(rollout)
        self._answer(gateway)

    def _poll(self, gateway: int) -> None:
        if self.now - self.heard_at.get(gateway, self.now) > GAP:
            for rollout in self.open:
                rollout.holders = set(self.heard_at)
        self.hear(gateway, self.now)
        self._waiting[gateway] = number = next(self._numbers)
        self.at(POLL, lambda: self._answer(gateway, number))
        if self.asked[gateway]:
            self._answer(gateway)

    def _answer(self, gateway: int, number: int | None = None) -> None:
        """Ends the poll that waits, if there is one, or only that one."""
        if gateway not in self._waiting or number not in (None, self._waiting[gateway]):
            return
        del self._waiting[gateway]
        self.flush(gateway)
        self.send(1, lambda: self._poll(gateway))


@dataclass(slots=True)
class Announced(Simulation):
    _called: set[int] = field(default_factory=set)
    _shown: dict[int, int] = field(default_factory=dict)
    """The number of the next time that a gateway shows itself."""

    def start_gateways(self) -> None:
        for machine in range(MACHINES):
            self.at(NEWS_WAIT * machine / MACHINES, self._question)
        for gateway in range(GATEWAYS):
            self.hear(gateway, 0.0)
            self._show_after(gateway, self.chance.random() * self._pause)

    def begin_call(self) -> None:
        self.send(1, lambda: None)

    def ask(self, gateway: int, rollout: Rollout) -> None:
        if gateway in rollout.holders:
            self.asked[gateway].add(rollout)
        if gateway not in self._called:
            self._called.add(gateway)
            self.send(1, lambda: None)  # its link asks anew
            self._show_after(gateway, 0.0)

    @property
    def _pause(self) -> float:
        return SHOW_PAUSE if self.agents else IDLE_PAUSE

    def _question(self) -> None:
        self.send(1, lambda: None)
        self.at(NEWS_WAIT, self._question)

    def _show_after(self, gateway: int, seconds: float) -> None:
        self._shown[gateway] = number = next(self._numbers)

        def show() -> None:
            if self._shown[gateway] == number:
                self.send(1, partial(self._come, gateway, self.now))

        self.at(seconds, show)

    def _come(self, gateway: int, made_at: float) -> None:
        """Its word is as old as its message was on its way."""
        self.hear(gateway, made_at)
        self._called.discard(gateway)
        self.flush(gateway)
        self._show_after(gateway, 0.0 if self.now - made_at > GAP else self._pause)


def measured_costs(cluster: RayCluster, messages: int) -> Costs:
    """Of a real shard in memory: the CPU of its process for messages with one operation, and with many."""

    async def cpu(client: PoolClient, pid: int, operations: int) -> float:
        shard, calls = client.shards.at("data_pool"), [ChannelIfOpen("t", "p")] * operations
        stamp = (await client.shards.plan()).stamp
        before = exact_cpu_seconds(pid)
        for _ in range(messages // AT_ONCE):
            await asyncio.gather(*(shard.run(calls, **stamp) for _ in range(AT_ONCE)))
        return (exact_cpu_seconds(pid) - before) / (messages // AT_ONCE * AT_ONCE)

    async def measure(namespace: str) -> Costs:
        client, pid = PoolClient("data_pool", namespace), pid_of_shard("data_pool", namespace)
        await client.register_trajectory(Registration("t", "p"))
        await cpu(client, pid, 1)  # warm
        one, many = await cpu(client, pid, 1), await cpu(client, pid, MANY)
        operation = max(0.0, many - one) / (MANY - 1)
        return Costs(message=one - operation, operation=operation)

    with cluster.namespace() as namespace:
        start_pool(PoolPlan(), namespace)
        return asyncio.run(measure(namespace))


def simulate(protocol: type[Simulation], costs: Costs) -> dict[str, float]:
    idle = protocol(costs, agents=0)
    idle.start()
    idle.run(WARM_UP)
    before = idle.messages
    idle.run(IDLE_PAUSE)
    busy = protocol(costs, agents=round(AGENTS_PER_GATEWAY * GATEWAYS / SHARDS))
    busy.start()
    busy.run(WARM_UP)
    sent = busy.messages
    busy.pause(PAUSE)
    paused_until = busy.now + PAUSE
    busy.run(PAUSE + OBSERVED)
    return {
        "idle_messages_per_s": round((idle.messages - before) / IDLE_PAUSE, 2),
        "messages_per_s": round(sent / WARM_UP, 1),
        "messages_per_s_after": round((busy.messages - sent) / (PAUSE + OBSERVED), 1),
        "recovery_s": round(busy.recovery(paused_until), 2),
        "completions": len(busy.ended),
        "answers_503": busy.failed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flush_storm", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--polled", action="store_true", help="as it was in 0.2")
    parser.add_argument("--quick", action="store_true", help="measure the costs with fewer messages")
    given = parser.parse_args()
    began = time.monotonic()
    with start_ray() as cluster:
        costs = measured_costs(cluster, 320 if given.quick else 6_400)
    print(f"a message takes {1e3 * costs.message:.3f} ms of a shard, an operation {1e6 * costs.operation:.1f} µs")
    figures = {"message_ms": round(1e3 * costs.message, 4), "operation_ms": round(1e3 * costs.operation, 5)}
    figures |= simulate(Polled if given.polled else Announced, costs)
    for name, value in figures.items():
        print(f"  {name:22} {value:>12g}")
    print(f"took {time.monotonic() - began:.0f} s")
    report(figures, {"idle_messages_per_s": 5, "recovery_s": 10, "answers_503": 0})


if __name__ == "__main__":
    main()
