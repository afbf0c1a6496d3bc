"""Every benchmark: how it is run, what it measures, and which of its figures are shown first, beside which others.

A new benchmark is one more row here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

OURS = "Stepwell"
RLLM, LITELLM, ATROPOS = "rllm-model-gateway", "LiteLLM", "atroposlib"
BARE_PROXY, BARE_RAY = "bare recording proxy", "bare Ray"


@dataclass(frozen=True, slots=True)
class Shown:
    """A line of a benchmark's first table."""

    what: str
    figure: str
    beside: Mapping[str, str] = field(default_factory=dict)
    """The figures it is compared with, by whose they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    name: str
    measures: str
    shown: tuple[Shown, ...]
    minutes: float
    """It is ended after so long."""
    arguments: tuple[str, ...] = ()
    module: str = ""
    """Without it, `benchmarks.NAME`."""
    is_by_name_only: bool = False
    """It takes hours, so it is left out unless it is named."""

    @property
    def command(self) -> tuple[str, ...]:
        return ("-m", self.module or f"benchmarks.{self.name}", *self.arguments)


BENCHMARKS: tuple[Benchmark, ...] = (
    Benchmark(
        name="gateway",
        measures="What a recorded call costs: CPU time of this gateway, of bare proxies and of two published gateways, "
        "with the same clients and the same engine.",
        shown=(
            *(
                Shown(
                    f"CPU of a call, {how}, ms",
                    f"stepwell_{kind}_cpu_ms",
                    {
                        BARE_PROXY: f"bare_recorder_{kind}_cpu_ms",
                        RLLM: f"rllm_{kind}_cpu_ms",
                        LITELLM: f"litellm_{kind}_cpu_ms",
                    },
                )
                for how, kind in (
                    ("not streamed", "unstreamed"),
                    ("streamed at once", "streamed"),
                    ("a chunk every 10 ms", "paced"),
                )
            ),
            Shown("latency that a call has more than without a gateway, p50, ms", "added_p50_ms"),
        ),
        minutes=80,
    ),
    Benchmark(
        name="streams",
        measures="The capacity of one gateway process: 2,000 slow streams at once, then 16,000 calls at one moment.",
        shown=(
            Shown("streams that failed", "streams_errors"),
            Shown("tokens not recorded", "tokens_not_recorded"),
            Shown("gap between chunks, p99, ms", "streams_gap_p99_ms", {"the engine itself": "direct_gap_p99_ms"}),
            Shown("calls answered", "crowd_calls"),
            Shown("calls that failed", "crowd_errors"),
        ),
        minutes=30,
    ),
    Benchmark(
        name="attacks",
        measures="What one hostile client does to a gateway and to honest agents beside it, without the bounds on "
        "requests and with them.",
        shown=tuple(
            Shown(f"{what}, {attack}", f"{attack}_{kind}_after", {"without bounds": f"{attack}_{kind}_before"})
            for what, kind in (
                ("peak memory, as a multiple of idle", "memory"),
                ("honest p99, of that in peace", "p99"),
            )
            for attack in ("nested", "headers", "names", "slow", "bodies")
        ),
        minutes=40,
    ),
    Benchmark(
        name="pool",
        measures="What the DataPool costs: steps of 2,048 + 256 tokens into it and out of it, compared with bare Ray.",
        shown=(
            Shown("steps a second into a shard", "shard_steps_s", {BARE_RAY: "bare_steps_s"}),
            Shown("with a journal, safe from a loss of power", "journal_steps_s", {BARE_RAY: "bare_steps_s"}),
            Shown("with a journal in PostgreSQL", "postgres_steps_s", {BARE_RAY: "bare_steps_s"}),
            Shown(
                "512 steps out, ms",
                "fetch_ms",
                {BARE_RAY: "bare_put_get_ms", "a bare Ray actor that returns them": "bare_actor_ms"},
            ),
        ),
        minutes=40,
    ),
    Benchmark(
        name="pool_rules",
        measures="What a step costs in the rules and the state of a pool, with a short queue and with a long one.",
        shown=(
            Shown("1,000 steps queued, µs a step", "us_per_step_at_1k"),
            Shown("1,000,000 steps queued, µs a step", "us_per_step_at_1m"),
        ),
        minutes=30,
    ),
    Benchmark(
        name="long_rollout",
        measures="What a rollout of 200 turns and 100,000 tokens costs on its way to a trainer, compared with whole "
        "prompts for each turn.",
        shown=(
            Shown("bytes shipped", "bytes", {"whole prompts": "bytes_whole_prompts"}),
            Shown("fetch and merge, ms", "fetch_and_merge_ms", {"whole prompts": "fetch_and_merge_ms_whole_prompts"}),
        ),
        minutes=30,
    ),
    Benchmark(
        name="chaos_pool",
        measures="A pool under load whose shards are killed 100 times: is a step lost, is one trained twice?",
        shown=(
            Shown("kills", "kills"),
            Shown("acknowledged steps", "steps_acknowledged"),
            Shown("of them lost", "lost"),
            Shown("of them trained twice", "duplicated"),
            Shown("a killed shard serves again after, median, s", "recovery_median_s"),
        ),
        arguments=("--kills", "100"),
        minutes=40,
    ),
    Benchmark(
        name="exactness",
        measures="Conversations through a gateway with the bridge, for families of chat templates, tools, dialects, "
        "streamed and not: every recorded token is compared with what the engine was sent and has sampled.",
        shown=(
            Shown("conversations", "cells"),
            Shown("exact, one row of tokens", "exact"),
            Shown("rendered anew because of the chat template, or refused by it", "refused"),
            Shown("wrong", "wrong"),
        ),
        minutes=30,
    ),
    Benchmark(
        name="exactness_vllm",
        module="benchmarks.exactness",
        arguments=("--vllm",),
        measures="The same on real vLLM with a tiny model, for some of the families.",
        shown=(
            Shown("conversations", "cells"),
            Shown("exact, one row of tokens", "exact"),
            Shown("rendered anew because of the chat template, or refused by it", "refused"),
            Shown("wrong", "wrong"),
        ),
        minutes=40,
    ),
    Benchmark(
        name="bridge",
        measures="What joining the turns of a conversation brings and costs: rows and tokens that a trainer computes, "
        "and time per call.",
        shown=(
            Shown(
                "rows of a rollout of 8 turns", "rows_per_rollout_all", {"without the bridge": "rows_per_rollout_off"}
            ),
            Shown(
                "tokens that a trainer computes", "computed_tokens_all", {"without the bridge": "computed_tokens_off"}
            ),
            Shown("a call, p50, ms", "ms_on_p50", {"without the bridge": "ms_off_p50"}),
        ),
        minutes=30,
    ),
    Benchmark(
        name="bridge_vllm",
        module="benchmarks.bridge",
        arguments=("--vllm",),
        measures="The time of the same calls on real vLLM with a tiny model.",
        shown=(
            Shown("a call, p50, ms", "ms_on_p50", {"without the bridge": "ms_off_p50"}),
            Shown(
                "hits in vLLM's prefix cache",
                "prefix_cache_hit_rate_on",
                {"without the bridge": "prefix_cache_hit_rate_off"},
            ),
        ),
        minutes=40,
    ),
    Benchmark(
        name="bridge_matrix",
        measures="The bridge with public chat templates and three tokenizers: a call is bridged as the template would "
        "render it, or refused with a reason.",
        shown=(
            Shown("chat templates", "templates"),
            Shown("cases", "cells"),
            Shown("bridged", "bridged"),
            Shown("refused", "refused"),
            Shown("wrong", "wrong"),
        ),
        minutes=30,
    ),
    Benchmark(
        name="truth",
        measures="Is what a trainer learns the policy gradient? The cosine with the exact gradient, which is computed "
        "by enumeration: 1 is the same direction. TRL and verl compute with their own code where they are installed.",
        shown=(
            *(
                Shown(what, f"ours_{scenario}", {"TRL": f"trl_{scenario}", "verl": f"verl_{scenario}"})
                for what, scenario in (
                    ("rollouts of two turns", "plain"),
                    ("weights that change during a rollout", "in_flight"),
                    ("forks", "forks"),
                    ("steps left out", "left_out"),
                    ("late rewards", "late_rewards"),
                )
            ),
            Shown("no log-probabilities", "recomputed_plain", {"TRL": "current_trl", "verl": "current_verl"}),
            Shown("no log-probabilities, two versions", "recomputed_in_flight_far"),
        ),
        minutes=30,
    ),
    Benchmark(
        name="trainers",
        measures="What it costs a trainer to get its batches from a pool: each takes the same updates on the same "
        "rollouts, from the pool and from memory without Stepwell.",
        shown=(
            Shown(
                "reference trainer, samples a second", "ours_samples_s", {"from memory": "ours_from_memory_samples_s"}
            ),
            Shown("TRL, samples a second", "trl_samples_s", {"from memory": "trl_from_memory_samples_s"}),
            Shown("verl, samples a second", "verl_samples_s", {"from memory": "verl_from_memory_samples_s"}),
            Shown(
                "Tinker (SkyRL), samples a second", "tinker_samples_s", {"from memory": "tinker_from_memory_samples_s"}
            ),
        ),
        minutes=90,
    ),
    Benchmark(
        name="learning",
        measures="Does a model learn, how fast, and what do a pool and a gateway in between cost? With real vLLM.",
        shown=(
            Shown("`stepwell demo` from start to end, s", "seconds"),
            Shown("expected reward at its start", "start_reward"),
            Shown("expected reward at its end", "end_reward"),
            Shown(
                "samples a second of the loop",
                "ours_samples_s",
                {"without pool and gateway": "bare_overlapping_samples_s"},
            ),
            Shown("50 updates with a slow tool, s", "slow_async_seconds", {"synchronously": "slow_sync_seconds"}),
        ),
        minutes=120,
    ),
    Benchmark(
        name="live",
        measures="How many rollouts a model needs until its expected reward is 0.8: from live sessions with a running "
        "baseline, and from groups of four rollouts.",
        shown=(Shown("rollouts", "live_running_rollouts", {"groups of four": "groups_of_4_rollouts"}),),
        minutes=90,
    ),
    Benchmark(
        name="guard",
        measures="How often the guard is wrong about a canary and in validation, and how long a decision takes, by "
        "simulation; docs/guard.md has its tables.",
        shown=(
            Shown("equal versions rolled back, 1 reward a minute", "rate_1_margins_0_rolled_back"),
            Shown("versions worse by the margin promoted, 1 reward a minute", "rate_1_margins_1_promoted"),
            Shown("equal versions refused in validation, 100 tasks", "validation_100_equal_refused"),
        ),
        minutes=15,
    ),
    Benchmark(
        name="growth",
        measures="How cost grows with held steps, shards, waiting consumers and producers, and turns. A curve must be "
        "flat, or linear at most; docs/operations/scaling.md has its tables and chart.",
        shown=(),
        minutes=120,
    ),
    Benchmark(
        name="rewards",
        measures="What a reward costs compared with a bare Ray actor, and whether agents notice the computation.",
        shown=(
            Shown("scores a second", "worker_scores_s", {BARE_RAY: "bare_scores_s"}),
            Shown(
                "a call while rewards are computed, p50, ms",
                "gateway_p50_saturated_ms",
                {"idle": "gateway_p50_idle_ms"},
            ),
        ),
        minutes=40,
    ),
    Benchmark(
        name="atropos",
        measures="What the Atropos server costs: groups in and batches out, compared with atroposlib's own server.",
        shown=(
            Shown(
                "CPU of a group sent as JSON, ms", "stepwell_json_post_cpu_ms", {ATROPOS: "atroposlib_json_post_cpu_ms"}
            ),
            Shown(
                "CPU of a batch as JSON, ms", "stepwell_json_batch_cpu_ms", {ATROPOS: "atroposlib_json_batch_cpu_ms"}
            ),
            Shown("memory of a queue, MB", "stepwell_memory_mb", {ATROPOS: "atroposlib_memory_mb"}),
            Shown("slowest status call during a batch, ms", "status_env_ms", {ATROPOS: "atroposlib_status_env_ms"}),
        ),
        minutes=80,
    ),
    Benchmark(
        name="dashboard",
        measures="The dashboard over 100,000 trajectories: how soon it shows them, and what it costs the pool.",
        shown=(
            Shown("first page in a browser, s", "page_first_paint_s"),
            Shown("slowest filter in a browser, s", "page_slowest_filter_s"),
            Shown("share of a core that watching takes from the pool", "pool_share"),
        ),
        minutes=60,
    ),
    Benchmark(
        name="exports",
        measures="A pool exported to Parquet, imported into another pool and exported again.",
        shown=(
            Shown("steps", "steps"),
            Shown("equal bit for bit (1: yes)", "bit_equal"),
            Shown("steps a second to Parquet", "export_steps_s"),
            Shown("steps a second from Parquet into a pool", "import_steps_s"),
            Shown("memory of an export, MB", "export_peak_mb"),
        ),
        minutes=40,
    ),
    Benchmark(
        name="footprint",
        measures="Memory of the parts that grow with the load: a trajectory, a step, a call in flight.",
        shown=(
            Shown("an open trajectory in a shard, bytes", "trajectory_bytes"),
            Shown("a step in a shard, bytes", "step_bytes"),
            Shown("a gateway process, MB", "gateway_mb"),
            Shown("its link to Ray, one for all workers of a machine, MB", "link_mb", {BARE_RAY: "bare_ray_mb"}),
            Shown("a call in flight in a gateway, KB", "call_in_flight_kb"),
        ),
        minutes=30,
    ),
    Benchmark(
        name="forgetting",
        measures="How long a shard with a journal of 300 MB stands still while it forgets a person and takes 50 steps "
        "a second.",
        shown=(
            Shown(
                "longest time without an answer, ms",
                "forgetting_longest_ms",
                {"without a person to forget": "alone_longest_ms"},
            ),
            Shown("until everything is removed, s", "forget_s"),
        ),
        minutes=20,
    ),
    Benchmark(
        name="flush_storm",
        measures="What one of 100 shards does for 200 gateways while nothing happens, and how long completions are "
        "slow after it stood still for 2 s: simulated, with costs that are measured with a real shard.",
        shown=(
            Shown("CPU of a message, ms", "message_ms"),
            Shown("messages a second, idle", "idle_messages_per_s"),
            Shown("completions are slow for, s", "recovery_s"),
            Shown("completions answered with 503", "answers_503"),
        ),
        minutes=5,
    ),
    Benchmark(
        name="idle",
        measures="Messages a second that a shard gets from processes that only wait: machines with gateways, reward "
        "workers, a trainer, a dashboard; each measured with real shards, and summed up for 200 gateways.",
        shown=(
            Shown("the first shard", "idle_first_shard_per_s"),
            Shown("any other shard", "idle_shard_per_s"),
        ),
        minutes=6,
    ),
    Benchmark(
        name="survival",
        measures="Faults in a real cluster, one row each: lost nodes, heads and disks, cut links, jumping clocks, "
        "killed clients; every call and every step is counted.",
        shown=(),
        minutes=360,
        is_by_name_only=True,
    ),
)

QUOTED: Mapping[str, tuple[str, ...]] = {
    "exactness": ("cells", "wrong", "exact", "refused"),
    "chaos_pool": ("kills", "lost", "duplicated"),
    "gateway": ("of_bare_unstreamed", "rllm_of_ours_unstreamed", "litellm_of_ours_unstreamed"),
}
"""The figures that README.md and README.zh.md have in bold type, in this order, beside a link to that benchmark."""
