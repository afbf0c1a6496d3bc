"""`stepwell demo --task live`: users talk with a chat service whose model learns from what they say next.

Two vLLMs serve the model: one gets each new version first, as the canary, for some of the sessions. The guard compares
what users say to both versions, and promotes the new one or rolls it back. Half-way, one version is spoiled on purpose.

- There are no groups, and no session is declared ended: the pool ends those that are idle.
- Rewards come only from what users say next (`next_state`) and from thumbs.
"""

import asyncio
import shutil
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from stepwell.demo.engine import START_TIMEOUT
from stepwell.demo.live_outcome import LiveOutcome, LiveRecord, LiveStatus, TurnReader, recent_acceptance
from stepwell.demo.live_run import PoisonedSync, spoiled
from stepwell.demo.live_service import of_like_length, shown
from stepwell.demo.model import warm_up
from stepwell.demo.run import METRICS, NAMESPACE, OUTCOME, POOL, DemoParts, DemoRun
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.watching import TrajectorySnapshot
from stepwell.trainers.guard.guard_settings import GuardSettings
from stepwell.trainers.guard.guarded_sync import GuardedSync
from stepwell.trainers.reporting import ToJsonl
from stepwell.trainers.settings import Settings
from stepwell.trainers.trainer import AsyncTrainer
from stepwell.trainers.transfers import CheckpointTransfer
from stepwell.trainers.weight_sync import VersionedPool, WeightSync

if TYPE_CHECKING:
    from transformers import Qwen2ForCausalLM

    from stepwell.pool.client import DataPool

TURNS, VERSIONS, PICTURE = "turns.jsonl", "versions", "acceptance.png"
WARMUP_STEPS, WARMUP_EXAMPLES = 300, 64
UPDATES = 44
STEPS = 224
"""Replies per update; about three quarters of them have a reward."""
RATE = 1.4e-3
RATE_WARMUP = 5
CONCURRENCY = 32
"""Users at a time."""
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


class LiveDemo(DemoRun):
    """Users whose next words say how good the model was."""

    engine_logs = ("vllm-1.log", "vllm-2.log")
    agents_log, agents_module = "service.log", "stepwell.demo.live_service"

    def _usual_updates(self) -> int:
        return UPDATES

    def run(self) -> LiveOutcome:
        (self._out / TURNS).unlink(missing_ok=True)
        shutil.rmtree(self._out / VERSIONS, ignore_errors=True)  # the guard would go on where an earlier run ended
        turns = TurnReader(self._out / TURNS)
        with ExitStack() as stack:
            parts = self._start(stack)
            trainer, sync = self._trainer(stack, parts)
            parts.agents.tell("talk")
            self._screen.say("users talk; from now on they are the only source of rewards")
            self._train(trainer, parts.pool, turns)
            parts.agents.stop()
            turns.read()
            record = LiveRecord(
                began_at=time.time() - self._screen.seconds,
                turns=turns.turns,
                decisions=parts.pool.decisions(),
                snapshots=asyncio.run(all_sessions()),
                poisoned=sync.poisoned,
            )
        outcome = record.outcome(seed=self._seed, updates=self._updates, seconds=self._screen.seconds)
        outcome.write(self._out / OUTCOME)
        if self._plot:
            record.write_picture(f"live, seed {self._seed}", self._out / PICTURE)
        return outcome

    def _start(self, stack: ExitStack) -> DemoParts:
        from stepwell.pool.client import PoolClient

        parts = self._begin(
            stack,
            Limits(require_reward=True, session_idle=SESSION_IDLE, batch_size=STEPS, max_staleness=MAX_STALENESS),
            lesson="to answer with the letters of a word, in any order",
            teach=self._teach,
            others="reward worker, gateway and users",
            concurrency=CONCURRENCY,
            turns=str(self._out / TURNS),
        )
        start_next_state(parts.like)
        parts.wait(self._screen.say)
        # the guard needs to know the engines now; gateways list theirs some time after their start
        asyncio.run(PoolClient(POOL, NAMESPACE).change_engines(add=parts.urls))
        return parts

    def _teach(self, model: "Qwen2ForCausalLM") -> None:
        import torch

        warm_up(model, of_like_length(shown(self._seed), WARMUP_EXAMPLES), WARMUP_STEPS, WARMUP_EXAMPLES)
        torch.set_num_threads(1)  # from now on the vLLMs need the other core

    def _trainer(self, stack: ExitStack, parts: DemoParts) -> tuple[AsyncTrainer, PoisonedSync]:
        guard = GuardedSync(parts.pool, self._out / VERSIONS, partial(weight_sync, parts.like), settings=GUARD)
        stack.callback(guard.close)
        sync = PoisonedSync(guard, parts.pool.decisions, after=self._updates // 2, spoil=spoiled)
        settings = Settings(
            unit="steps",
            groups=STEPS,
            advantage="step",
            baseline="running",
            learning_rate=RATE,
            warmup_updates=RATE_WARMUP,
            updates=self._updates,
        )
        reports = [ToJsonl(self._out / METRICS)]
        trainer = AsyncTrainer(parts.pool, parts.model, settings=settings, sync=sync, reports=reports)
        trainer.start()
        return trainer, sync

    def _train(self, trainer: AsyncTrainer, pool: "DataPool", turns: TurnReader) -> None:
        seen = 0
        with self._screen.acceptance(self._updates, is_plotting=self._plot) as show:
            while trainer.update < self._updates:
                trainer.step()
                turns.read()
                decisions = pool.decisions()
                show(
                    LiveStatus(
                        update=trainer.update,
                        updates=self._updates,
                        acceptance=recent_acceptance(turns.turns),
                        version=pool.stats().policy_version,
                        canary=pool.canary(),
                        decisions=decisions[seen:],
                    )
                )
                seen = len(decisions)


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


async def all_sessions() -> list[TrajectorySnapshot]:
    """A snapshot of every trajectory that the pool has had."""
    from stepwell.pool.client import PoolClient

    client = PoolClient(POOL, NAMESPACE)
    snapshots: dict[str, TrajectorySnapshot] = {}
    changes = await client.changes({})
    while changes.snapshots:
        snapshots |= {snapshot.trajectory_uid: snapshot for snapshot in changes.snapshots}
        changes = await client.changes(changes.cursors)
    return list(snapshots.values())
