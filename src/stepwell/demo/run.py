"""`stepwell demo`: the whole loop on one machine.

vLLM takes the longest to start, so it starts first, with the untrained model; it gets the warm-up's weights by the
first sync.

- After a failure, Ctrl-C or SIGTERM, nothing that was started is left running.
- After every sync the engine's log-probabilities are compared with the trainer's. If they differ by more than 1e-3,
  the run ends with SyncFailed.
"""

import json
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stepwell.demo.agent_process import GROUP, AgentProcess, Orders, start_agents
from stepwell.demo.engine import START_TIMEOUT, StartingEngine, find_vllm, start_engine
from stepwell.demo.model import make_model, warm_up, write_model
from stepwell.demo.screen import DemoScreen, write_picture
from stepwell.demo.tasks import TASKS, shown, split
from stepwell.pool.api.plan import Limits
from stepwell.trainers.reporting import Report, ToJsonl, UpdateMetrics
from stepwell.trainers.settings import Settings
from stepwell.trainers.trainer import AsyncTrainer
from stepwell.trainers.transfers import CheckpointTransfer
from stepwell.trainers.weight_sync import WeightSync

if TYPE_CHECKING:
    from transformers import Qwen2ForCausalLM

    from stepwell.pool.client import DataPool

METRICS, OUTCOME = "metrics.jsonl", "outcome.json"
POOL = "data_pool"
RATE = 7e-4
AHEAD = 1
"""Batches by which the agents may be ahead of the trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    task: str
    seed: int
    updates: int
    start: float
    """Mean reward on held-out samples, before training."""
    end: float
    """Mean reward on held-out samples, after training."""
    samples_per_second: float
    """Trained rollouts per second, from the first to the last update."""
    seconds: float
    """Duration of the whole run, with the start of vLLM and the warm-up."""
    largest_gap: float
    """Largest difference between the engine's log-probabilities and the trainer's, over all syncs."""

    def text(self) -> str:
        return (
            f"reward on held-out samples: {self.start:.3f} before, {self.end:.3f} after {self.updates} updates; "
            f"{self.samples_per_second:.0f} rollouts a second; "
            f"vLLM's log-probabilities are within {self.largest_gap:.0e} of the trainer's"
        )

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")


@dataclass(frozen=True, slots=True)
class DemoParts:
    """What runs during a run, beside the trainer."""

    model: "Qwen2ForCausalLM"
    """After the warm-up."""
    like: Path
    """The folder that the engines were started on."""
    pool: "DataPool"
    engines: tuple[StartingEngine, ...]
    agents: AgentProcess

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(engine.url for engine in self.engines)

    def wait(self, say: Callable[[str], None]) -> None:
        for engine in self.engines:
            engine.wait(say)
        self.agents.wait()
        say(f"{'vLLM is' if len(self.urls) == 1 else 'the vLLMs are'} up on {' and '.join(self.urls)}")


class DemoRun:
    """What is the same for all tasks."""

    engine_logs: tuple[str, ...] = ("vllm.log",)
    """A log for each engine."""
    agents_log, agents_module = "agents.log", "stepwell.demo.agent_process"

    def __init__(
        self,
        screen: DemoScreen,
        *,
        task: str,
        seed: int,
        updates: int | None,
        out: Path,
        plot: bool,
        vllm_python: str | None,
    ) -> None:
        """The arguments are the settings of `stepwell demo`."""
        self._python = find_vllm(vllm_python)
        self._screen = screen
        self._name = task
        self._seed = seed
        self._plot = plot
        self._updates = updates or self._usual_updates()
        self._out = out.absolute()
        self._out.mkdir(parents=True, exist_ok=True)
        (self._out / METRICS).unlink(missing_ok=True)

    def _usual_updates(self) -> int:
        return TASKS[self._name].updates

    def _begin(
        self,
        stack: ExitStack,
        limits: Limits,
        *,
        lesson: str,
        teach: "Callable[[Qwen2ForCausalLM], object]",
        others: str,
        concurrency: int,
        turns: str = "",
    ) -> DemoParts:
        """Engines and agents may still be starting. `lesson` says what `teach` does, `others` what the agents' process
        has in it."""
        model, say = make_model(self._seed), self._screen.say
        like = write_model(model, self._out / "model")
        engines = tuple(
            stack.enter_context(start_engine(like, python=self._python, log=self._out / log))
            for log in self.engine_logs
        )
        say(f"{'vLLM is' if len(engines) == 1 else 'two vLLMs are'} starting; meanwhile the model learns {lesson}")
        teach(model)
        say(f"pool, {others} are starting")
        address = stack.enter_context(demo_ray())
        pool = pool_with(POOL, limits)
        orders = Orders(
            task=self._name,
            seed=self._seed,
            engine=",".join(engine.url for engine in engines),
            tokenizer=str(like),
            data_pool_name=POOL,
            ray_address=address,
            ray_namespace=NAMESPACE,
            concurrency=concurrency,
            turns=turns,
        )
        agents = start_agents(orders, log=self._out / self.agents_log, module=self.agents_module)
        return DemoParts(model, like, pool, engines, stack.enter_context(agents))


class Demo(DemoRun):
    """Agents whose task says how good they were."""

    def run(self) -> DemoResult:
        with ExitStack() as stack:
            trainer, agents = self._start(stack)
            start = self._evaluate(agents, "before training")
            seconds = self._train(trainer, agents)
            end = self._evaluate(agents, "after training")
        gaps = [metrics.logprob_gap for metrics in self._metrics]
        result = DemoResult(
            task=self._name,
            seed=self._seed,
            updates=self._updates,
            start=start,
            end=end,
            samples_per_second=sum(metrics.rollouts for metrics in self._metrics) / seconds,
            seconds=self._screen.seconds,
            largest_gap=max((gap for gap in gaps if not math.isnan(gap)), default=math.nan),
        )
        result.write(self._out / OUTCOME)
        if self._plot:
            rewards = [metrics.reward for metrics in self._metrics]
            evaluations = [(0, start), (self._updates, end)]
            write_picture(rewards, evaluations, f"{self._name}, seed {self._seed}", self._out / "reward.png")
        return result

    def _start(self, stack: ExitStack) -> tuple[AsyncTrainer, AgentProcess]:
        import torch

        torch.set_num_threads(1)  # vLLM uses the other core
        task, settings = TASKS[self._name], Settings(updates=self._updates, learning_rate=RATE)
        samples, _ = split(task, self._seed)
        parts = self._begin(
            stack,
            demo_limits(batch=settings.groups * GROUP, ahead=AHEAD),
            lesson="the format from right and wrong examples",
            teach=lambda model: warm_up(model, shown(task, samples, self._seed)),
            others="gateway and agents",
            concurrency=64,
        )
        parts.wait(self._screen.say)
        transfer = CheckpointTransfer(self._out / "weights", like=parts.like)
        sync = WeightSync(parts.urls, transfer=transfer, pool=parts.pool, timeout=START_TIMEOUT)
        stack.callback(sync.close)  # before Ray ends: its thread asks the pool
        self._metrics: list[UpdateMetrics] = []
        reports: list[Report] = [ToJsonl(self._out / METRICS), self._metrics.append]
        trainer = AsyncTrainer(parts.pool, parts.model, settings=settings, sync=sync, reports=reports)
        trainer.start()
        return trainer, parts.agents

    def _evaluate(self, agents: AgentProcess, when: str) -> float:
        reward = agents.evaluate()
        self._screen.say(f"reward on held-out samples, {when}: {reward:.3f}")
        return reward

    def _train(self, trainer: AsyncTrainer, agents: AgentProcess) -> float:
        """Returns the duration in seconds."""
        agents.train()
        began = time.monotonic()
        with self._screen.rewards(self._updates, is_plotting=self._plot) as show:
            while trainer.update < self._updates:
                show(trainer.step())
        seconds = time.monotonic() - began
        agents.stop()
        return seconds
