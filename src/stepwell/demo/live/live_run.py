"""`stepwell demo --task live`: users talk with a chat service whose model learns from what they say next.

Two vLLMs serve the model: one gets each new version first, as the canary, for some of the sessions. The guard compares
what users say to both versions, and promotes the new one or rolls it back. Half-way, one version is spoiled on purpose.

- There are no groups, and no session is declared ended: the pool ends those that are idle.
- Rewards come only from what users say next (`next_state`) and from thumbs.
- After a failure, Ctrl-C or SIGTERM, nothing that was started is left running.
"""

import asyncio
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from stepwell.demo.agent_process import AgentProcess, start_agents
from stepwell.demo.engine import START_TIMEOUT, StartingEngine, find_vllm, start_engine
from stepwell.demo.live.live_chart import write_picture
from stepwell.demo.live.live_outcome import LiveOutcome, LiveRecord
from stepwell.demo.live.live_screen import LiveStatus, show_live
from stepwell.demo.live.live_service import LiveOrders
from stepwell.demo.live.poison import PoisonedSync, spoiled
from stepwell.demo.live.turns import TurnReader, recent_acceptance
from stepwell.demo.live.users import of_like_length, shown
from stepwell.demo.model import make_model, warm_up, write_model
from stepwell.demo.pool import NAMESPACE, demo_ray, pool_with
from stepwell.demo.screen import DemoScreen
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.watching import TrajectorySnapshot
from stepwell.trainers.guard.guard_settings import GuardSettings
from stepwell.trainers.guard.guarded_sync import GuardedSync
from stepwell.trainers.ports import VersionedPool
from stepwell.trainers.reporting import ToJsonl
from stepwell.trainers.settings import Settings
from stepwell.trainers.trainer import AsyncTrainer
from stepwell.trainers.transfers import CheckpointTransfer
from stepwell.trainers.weight_sync import WeightSync

if TYPE_CHECKING:
    from stepwell.pool.client import DataPool

TASK = "live"
POOL = "data_pool"
SERVICE = "stepwell.demo.live.live_service"
METRICS, TURNS, VERSIONS = "metrics.jsonl", "turns.jsonl", "versions"
OUTCOME, PICTURE = "outcome.json", "acceptance.png"
WARMUP_STEPS, WARMUP_EXAMPLES = 300, 64
UPDATES = 44
STEPS = 224
"""Replies per update; about three quarters of them have a reward."""
RATE = 1.4e-3
RATE_WARMUP = 5
MAX_STALENESS = 1
"""Promoted versions by which a trained reply may be behind. Users do not wait for the trainer: some come too late. With
older ones, or smaller batches, the model can unlearn what it knows."""
SESSION_IDLE = 2.0
"""Seconds without a call after which a session is taken as ended."""
GUARD = GuardSettings(
    canary_share=0.25,
    margin=0.8,
    alpha=0.01,
    beta=0.1,
    reward_range=(-1.0, 1.0),
    rewards_per_session=None,
)
"""A service with few users wants quick decisions: only a clear loss is a reason for a rollback."""


class LiveDemo:
    def __init__(
        self, screen: DemoScreen, *, seed: int, updates: int | None, out: Path, plot: bool, vllm_python: str | None
    ) -> None:
        """The arguments are the settings of `stepwell demo`."""
        self._python = find_vllm(vllm_python)
        self._screen = screen
        self._seed = seed
        self._plot = plot
        self._began_at = time.time() - screen.seconds
        self._updates = updates or UPDATES
        self._out = out.absolute()
        self._out.mkdir(parents=True, exist_ok=True)
        for name in (METRICS, TURNS):
            (self._out / name).unlink(missing_ok=True)
        shutil.rmtree(self._out / VERSIONS, ignore_errors=True)  # the guard would go on where an earlier run ended
        self._turns = TurnReader(self._out / TURNS)

    def run(self) -> LiveOutcome:
        with ExitStack() as stack:
            parts = self._start(stack)
            parts.service.tell("talk")
            self._screen.say("users talk; from now on they are the only source of rewards")
            self._train(parts)
            parts.service.tell("stop")
            self._turns.read()
            record = LiveRecord(
                began_at=self._began_at,
                turns=self._turns.turns,
                decisions=parts.pool.decisions(),
                snapshots=asyncio.run(all_sessions()),
                poisoned=parts.sync.poisoned,
            )
        outcome = record.outcome(seed=self._seed, updates=self._updates, seconds=self._screen.seconds)
        outcome.write(self._out / OUTCOME)
        if self._plot:
            write_picture(record, f"live, seed {self._seed}", self._out / PICTURE)
        return outcome

    def _start(self, stack: ExitStack) -> "LiveParts":
        import torch

        seed, say = self._seed, self._screen.say
        model = make_model(seed)
        like = write_model(model, self._out / "model")
        engines = [self._start_engine(stack, like, number) for number in (1, 2)]
        say("two vLLMs are starting; meanwhile the model learns to answer with the letters of a word, in any order")
        warm_up(model, of_like_length(shown(seed), WARMUP_EXAMPLES), WARMUP_STEPS, WARMUP_EXAMPLES)
        torch.set_num_threads(1)  # from now on the vLLMs need the other core
        say("pool, reward worker, gateway and users are starting")
        address = stack.enter_context(demo_ray())
        pool = start_pool()
        orders = self._orders(engines, like, address)
        service = stack.enter_context(start_agents(orders, log=self._out / "service.log", module=SERVICE))
        start_next_state(like)
        for engine in engines:
            engine.wait(say)
        service.wait()
        asyncio.run(list_engines(tuple(engine.url for engine in engines)))
        say(f"the vLLMs are up on {' and '.join(engine.url for engine in engines)}")
        guard = GuardedSync(pool, self._out / VERSIONS, partial(weight_sync, like), settings=GUARD)
        stack.callback(guard.close)
        sync = PoisonedSync(guard, pool.decisions, after=self._updates // 2, spoil=spoiled)
        trainer = AsyncTrainer(
            pool, model, settings=self._training(), sync=sync, reports=[ToJsonl(self._out / METRICS)]
        )
        trainer.start()
        return LiveParts(pool, trainer, sync, service)

    def _start_engine(self, stack: ExitStack, like: Path, number: int) -> StartingEngine:
        return stack.enter_context(start_engine(like, python=self._python, log=self._out / f"vllm-{number}.log"))

    def _orders(self, engines: Sequence[StartingEngine], like: Path, ray_address: str) -> LiveOrders:
        return LiveOrders(
            task=TASK,
            seed=self._seed,
            engine=",".join(engine.url for engine in engines),
            tokenizer=str(like),
            data_pool_name=POOL,
            ray_address=ray_address,
            ray_namespace=NAMESPACE,
            turns=str(self._out / TURNS),
        )

    def _training(self) -> Settings:
        return Settings(
            unit="steps",
            groups=STEPS,
            advantage="step",
            baseline="running",
            learning_rate=RATE,
            warmup_updates=RATE_WARMUP,
            updates=self._updates,
        )

    def _train(self, parts: "LiveParts") -> None:
        trainer, pool, seen = parts.trainer, parts.pool, 0
        with show_live(self._screen, self._updates, is_plotting=self._plot) as show:
            while trainer.update < self._updates:
                trainer.step()
                self._turns.read()
                decisions = pool.decisions()
                show(
                    LiveStatus(
                        update=trainer.update,
                        updates=self._updates,
                        acceptance=recent_acceptance(self._turns.turns),
                        version=pool.stats().policy_version,
                        canary=pool.canary(),
                        decisions=decisions[seen:],
                    )
                )
                seen = len(decisions)


@dataclass(frozen=True, slots=True)
class LiveParts:
    """What runs during a run."""

    pool: "DataPool"
    trainer: AsyncTrainer
    sync: PoisonedSync
    service: AgentProcess


def start_pool() -> "DataPool":
    limits = Limits(require_reward=True, session_idle=SESSION_IDLE, batch_size=STEPS, max_staleness=MAX_STALENESS)
    return pool_with(POOL, limits)


def start_next_state(tokenizer: Path) -> None:
    """A reward worker that judges each reply by what the user says next."""
    from stepwell.pool.client import PoolClient
    from stepwell.rewards.runner.messages import Job
    from stepwell.rewards.worker import RewardPlan, start_rewards

    job = Job(function="next_state", tokenizer_path=str(tokenizer), children=1)
    start_rewards(RewardPlan(job=job), partial(PoolClient, POOL, NAMESPACE), NAMESPACE)


def weight_sync(like: Path, pool: VersionedPool, folder: Path) -> WeightSync:
    transfer = CheckpointTransfer(folder, like=like)
    return WeightSync(pool=pool, transfer=transfer, timeout=START_TIMEOUT, background=False)


async def list_engines(addresses: tuple[str, ...]) -> None:
    """The guard needs to know them now; gateways list theirs some time after their start."""
    from stepwell.pool.client import PoolClient

    await PoolClient(POOL, NAMESPACE).change_engines(add=addresses)


async def all_sessions() -> list[TrajectorySnapshot]:
    """Of every trajectory that the pool has had."""
    from stepwell.pool.client import PoolClient

    client = PoolClient(POOL, NAMESPACE)
    snapshots: dict[str, TrajectorySnapshot] = {}
    changes = await client.changes({})
    while changes.snapshots:
        snapshots |= {snapshot.trajectory_uid: snapshot for snapshot in changes.snapshots}
        changes = await client.changes(changes.cursors)
    return list(snapshots.values())
