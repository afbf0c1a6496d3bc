"""The size of a deployment for so many agents, from the figures of benchmarks.growth. Pure arithmetic.

docs/operations/scaling.md shows it, and a test compares the page with this file.
"""

import math
from dataclasses import dataclass

from benchmarks.footprint import PROMPT, RESPONSE
from benchmarks.gateway_rig import canned
from benchmarks.growth_rig.curve import Figures

AGENTS = (100, 10_000, 1_000_000)
NEEDED_FOR_SIZES = {
    *("call_cpu_ms", "streamed_call_cpu_ms", "gateway_mb", "call_in_flight_kb"),
    *("trajectory_bytes", "step_bytes", "step_bytes_counted"),
    *(f"turns_{figure}_at_{turns}" for figure in ("gateway_cpu_ms", "prompt_tokens") for turns in (100, 2_000)),
    *(
        "waiting_producers_step_cpu_us_at_256",
        "shards_resident_mb_at_64",
        "held_steps_journal_restart_cpu_s_at_1000000",
    ),
}
"""Names of figures."""
GATEWAY_BUSY, SHARD_BUSY = 0.6, 0.5
"""The part of a core that a process may need in the mean. The rest of a shard's is for fetches and restarts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLoad:
    """What one agent does all the time."""

    seconds_a_call: float = 20.0
    """From the start of a call to the start of the next one."""
    answer_seconds: float = 10.0
    calls_a_rollout: int = 10
    prompt_tokens: int = PROMPT
    """New ones, of a call."""
    response_tokens: int = RESPONSE

    @property
    def history_tokens(self) -> int:
        """Of a call in the middle of a rollout."""
        return self.calls_a_rollout * (self.prompt_tokens + self.response_tokens) // 2

    @property
    def held_steps(self) -> int:
        """Of an open trajectory, in the mean."""
        return self.calls_a_rollout // 2


LOAD = AgentLoad()


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """What waits for a trainer, whatever the number of agents."""

    batch_rollouts: int = 1_024
    batches: int = 2
    """With --max-staleness 1."""
    spool_seconds: float = 600.0
    """For which the pool may be away."""


WAITS = Waits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What so many agents need."""

    agents: int
    calls_s: float
    calls_in_flight: float
    gateway_cores: float
    streamed_cores: float
    """In place of gateway_cores, if every answer is streamed in small chunks."""
    gateways: int
    streamed_gateways: int
    gateway_gb: float
    spool_gb: float
    to_gateways_mb_s: float
    to_pool_mb_s: float
    shard_cores: float
    shards: int
    shard_gb: float
    journal_gb: float
    journal_mb_s: float
    restart_s: float
    batch_mb: float
    archive_gb_h: float


def history_ms(figures: Figures) -> float:
    """The CPU of a gateway for 1,000 more tokens of history: the slope of the curve over turns, from 100 to 2,000."""
    (few_ms, few), (many_ms, many) = (
        (figures[f"turns_gateway_cpu_ms_at_{turns}"], figures[f"turns_prompt_tokens_at_{turns}"])
        for turns in (100, 2_000)
    )
    return (many_ms - few_ms) / (many - few) * 1e3


def call_ms(figures: Figures, load: AgentLoad, *, streamed: bool) -> float:
    """The CPU of a gateway for one call: that of the measured call in proportion to its response, and its history."""
    measured = figures["streamed_call_cpu_ms" if streamed else "call_cpu_ms"]
    longer = max(0, load.history_tokens - canned.PROMPT) / 1e3
    return measured * load.response_tokens / canned.RESPONSE + longer * history_ms(figures)


def size(agents: int, figures: Figures, load: AgentLoad = LOAD, waits: Waits = WAITS) -> Sizes:
    calls_s = agents / load.seconds_a_call
    in_flight = calls_s * load.answer_seconds
    cores, streamed_cores = (calls_s * call_ms(figures, load, streamed=streamed) / 1e3 for streamed in (False, True))
    gateways, streamed_gateways = (math.ceil(needed / GATEWAY_BUSY) for needed in (cores, streamed_cores))
    shard_cores = calls_s * figures["waiting_producers_step_cpu_us_at_256"] / 1e6
    shards = math.ceil(shard_cores / SHARD_BUSY)
    waiting_steps = waits.batches * waits.batch_rollouts * load.calls_a_rollout
    held_steps = agents * load.held_steps + waiting_steps
    counted = figures["step_bytes_counted"]
    shard_bytes = (
        agents * figures["trajectory_bytes"]
        + held_steps * figures["step_bytes"]
        + shards * figures["shards_resident_mb_at_64"] / 64 * 1e6
    )
    answer_bytes = 7 * load.history_tokens + 60 * load.response_tokens
    return Sizes(
        agents=agents,
        calls_s=calls_s,
        calls_in_flight=in_flight,
        gateway_cores=cores,
        streamed_cores=streamed_cores,
        gateways=gateways,
        streamed_gateways=streamed_gateways,
        gateway_gb=(streamed_gateways * figures["gateway_mb"] * 1e6 + in_flight * figures["call_in_flight_kb"] * 1e3)
        / 1e9,
        spool_gb=waits.spool_seconds * calls_s * counted / 1e9,
        to_gateways_mb_s=calls_s * answer_bytes / 1e6,
        to_pool_mb_s=calls_s * counted / 1e6,
        shard_cores=shard_cores,
        shards=shards,
        shard_gb=shard_bytes / 1e9,
        journal_gb=held_steps * counted / 1e9,
        journal_mb_s=2 * calls_s * counted / 1e6,
        restart_s=held_steps / shards * figures["held_steps_journal_restart_cpu_s_at_1000000"] / 1e6,
        batch_mb=waits.batch_rollouts * load.calls_a_rollout * counted / 1e6,
        archive_gb_h=3_600 * calls_s * counted / 1e9,
    )
