"""`stepwell demo --task live`: users talk with a chat service whose model learns from what they say next.

Two vLLMs serve the model: one gets each new version first, as the canary, for some of the sessions. The guard compares
what users say to both versions, and promotes the new one or rolls it back. Half-way, one version is spoiled on purpose.

- There are no groups, and no session is declared ended: the pool ends those that are idle.
- Rewards come only from what users say next (`next_state`) and from thumbs.
- The spoiled weights are the trainer's own, trained towards wrong answers for some steps: fluent, and no fault shows in
  a checksum or a log-probability. Only the users can tell.
"""

import asyncio
import copy
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from stepwell.demo.engine import START_TIMEOUT
from stepwell.demo.live_outcome import (
    LiveOutcome,
    LiveRecord,
    LiveStatus,
    TurnReader,
    recent_acceptance,
    showing_acceptance,
)
from stepwell.demo.live_service import SimulatedUser, conversation, of_like_length, shown
from stepwell.demo.model import ScriptTurn, warm_up
from stepwell.demo.run import METRICS, NAMESPACE, OUTCOME, POOL, DemoRun
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.policy import PolicyDecision
from stepwell.pool.api.watching import TrajectorySnapshot
from stepwell.trainers.guard.guard_settings import GuardSettings
from stepwell.trainers.guard.guarded_sync import GuardedSync
from stepwell.trainers.reporting import ToJsonl
from stepwell.trainers.settings import Settings
from stepwell.trainers.trainer import AsyncTrainer, Sync, Synced
from stepwell.trainers.transfers import CheckpointTransfer
from stepwell.trainers.weight_sync import VersionedPool, WeightSync

if TYPE_CHECKING:
    import torch
    from transformers import Qwen2ForCausalLM

WRONG_STEPS, WRONG_EXAMPLES = 50, 24
VERSIONS = "versions"
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


class PoisonedSync:
    """A Sync that spoils the weights of one canary, the first after version `after`.

    The guard skips versions that come while it tests another one, so every version is spoiled until one of them has
    become a canary.
    """

    def __init__(
        self,
        sync: Sync,
        decisions: Callable[[], Sequence[PolicyDecision]],
        *,
        after: int,
        spoil: "Callable[[torch.nn.Module], torch.nn.Module]",
    ) -> None:
        self._sync = sync
        self._decisions = decisions
        self._after = after
        self._spoil = spoil
        self._spoiled_versions: set[int] = set()
        self._spoiled_model: torch.nn.Module | None = None

    def sync(self, weights: "torch.nn.Module", version: int) -> Synced:
        if version <= self._after or self.poisoned is not None:
            return self._sync.sync(weights, version)
        if self._spoiled_model is None:
            self._spoiled_model = self._spoil(weights)
        self._spoiled_versions.add(version)
        return self._sync.sync(self._spoiled_model, version)

    @property
    def poisoned(self) -> int | None:
        """The spoiled version that users got; None if none has become a canary yet."""
        decided = (d.version for d in self._decisions() if d.action in ("canary", "promote"))
        return next((version for version in decided if version in self._spoiled_versions), None)


def spoiled(model: "torch.nn.Module") -> "torch.nn.Module":
    """A copy that was trained to swap the first two letters of a word."""
    worse = copy.deepcopy(model)
    warm_up(worse, _wrong_conversations(), WRONG_STEPS, WRONG_EXAMPLES)
    return worse


def _wrong_conversations() -> Iterator[Sequence[ScriptTurn]]:
    rng = random.Random(0)
    while True:
        yield tuple(conversation(SimulatedUser(rng), lambda word: word[1] + word[0] + word[2:]))


class LiveDemo(DemoRun):
    """Users whose next words say how good the model was."""

    engine_logs = ("vllm-1.log", "vllm-2.log")
    agents_log, agents_module = "service.log", "stepwell.demo.live_service"
    lesson = "to answer with the letters of a word, in any order"
    others = "reward worker, gateway and users"
    concurrency = 32
    turns = "turns.jsonl"

    def _usual_updates(self) -> int:
        return UPDATES

    def run(self) -> LiveOutcome:
        (self._out / self.turns).unlink(missing_ok=True)
        shutil.rmtree(self._out / VERSIONS, ignore_errors=True)  # the guard would go on where an earlier run ended
        turns = TurnReader(self._out / self.turns)
        with ExitStack() as stack:
            self._start(stack)
            trainer, sync = self._trainer(stack)
            self._agents.tell("talk")
            self._screen.say("users talk; from now on they are the only source of rewards")
            self._train(trainer, turns)
            self._agents.stop()
            turns.read()
            record = LiveRecord(
                began_at=time.time() - self._screen.seconds,
                turns=turns.turns,
                decisions=self._pool.decisions(),
                snapshots=asyncio.run(all_sessions()),
                poisoned=sync.poisoned,
            )
        outcome = record.outcome(seed=self._seed, updates=self._updates, seconds=self._screen.seconds)
        outcome.write(self._out / OUTCOME)
        if self._plot:
            record.write_picture(f"live, seed {self._seed}", self._out / "acceptance.png")
        return outcome

    def _start(self, stack: ExitStack) -> None:
        from stepwell.pool.client import PoolClient

        self._start_parts(
            stack, Limits(require_reward=True, session_idle=SESSION_IDLE, batch_size=STEPS, max_staleness=MAX_STALENESS)
        )
        start_next_state(self._like)
        self._wait()
        # the guard needs to know the engines now; gateways list theirs some time after their start
        asyncio.run(PoolClient(POOL, NAMESPACE).change_engines(add=self._urls))

    def _teach(self, model: "Qwen2ForCausalLM") -> None:
        import torch

        warm_up(model, of_like_length(shown(self._seed), WARMUP_EXAMPLES), WARMUP_STEPS, WARMUP_EXAMPLES)
        torch.set_num_threads(1)  # from now on the vLLMs need the other core

    def _trainer(self, stack: ExitStack) -> tuple[AsyncTrainer, PoisonedSync]:
        guard = GuardedSync(self._pool, self._out / VERSIONS, partial(weight_sync, self._like), settings=GUARD)
        stack.callback(guard.close)
        sync = PoisonedSync(guard, self._pool.decisions, after=self._updates // 2, spoil=spoiled)
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
        trainer = AsyncTrainer(self._pool, self._model, settings=settings, sync=sync, reports=reports)
        trainer.start()
        return trainer, sync

    def _train(self, trainer: AsyncTrainer, turns: TurnReader) -> None:
        seen = 0
        with showing_acceptance(self._screen, self._updates, is_plotting=self._plot) as show:
            while trainer.update < self._updates:
                trainer.step()
                turns.read()
                decisions = self._pool.decisions()
                status = LiveStatus(
                    update=trainer.update,
                    updates=self._updates,
                    acceptance=recent_acceptance(turns.turns),
                    version=self._pool.stats().policy_version,
                    canary=self._pool.canary(),
                    decisions=decisions[seen:],
                )
                show(status)
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
