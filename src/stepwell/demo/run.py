"""`stepwell demo`: the whole loop on one machine, with a Ray cluster on loopback, which ends with the demo.

vLLM takes the longest to start, so it starts first, with the untrained model; it gets the warm-up's weights by the
first sync.

- After a failure, Ctrl-C or SIGTERM, nothing that was started is left running.
- After every sync the engine's log-probabilities are compared with the trainer's. If they differ by more than 1e-3,
  the run ends with SyncFailed.
"""

import json
import math
import secrets
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from stepwell.demo.agent_process import GROUP, AgentProcess, Orders, start_agents
from stepwell.demo.engine import START_TIMEOUT, find_vllm, start_engine
from stepwell.demo.model import make_model, warm_up, write_model
from stepwell.demo.screen import DemoScreen, write_picture
from stepwell.demo.tasks import TASKS, shown, split
from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.client.ray_cluster import local_ray, make_ray_folder
from stepwell.trainers.reporting import Report, ToJsonl, UpdateMetrics
from stepwell.trainers.settings import Settings
from stepwell.trainers.trainer import AsyncTrainer
from stepwell.trainers.transfers import CheckpointTransfer
from stepwell.trainers.weight_sync import WeightSync

if TYPE_CHECKING:
    from transformers import Qwen2ForCausalLM

    from stepwell.pool.client import DataPool


NAMESPACE = "stepwell-demo"
STORE = 128 * 2**20
"""Bytes of Ray's object store: more than the demo uses."""
METRICS, OUTCOME = "metrics.jsonl", "outcome.json"
POOL = "data_pool"
RATE = 7e-4
AHEAD = 1
"""Batches by which the agents may be ahead of the trainer."""


class Terminated(BaseException):
    """A SIGTERM came."""


@contextmanager
def keeping_sigterm() -> Iterator[None]:
    """The handler of SIGTERM is the same after the block: a start of Ray sets one of its own."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """A SIGTERM ends the block by Terminated. Further ones do not disturb the cleanup. For the main thread."""
    with keeping_sigterm():
        signal.signal(signal.SIGTERM, _end)
        yield


def _end(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise Terminated


@contextmanager
def demo_ray() -> Iterator[str]:
    """Yields its address."""
    folder = make_ray_folder()
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        token = folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        with keeping_sigterm():
            joining = stack.enter_context(local_ray(NAMESPACE, token=token, store=STORE, folder=folder))
        yield joining["RAY_ADDRESS"]


def demo_limits(*, batch: int, ahead: int) -> Limits:
    """For batches of `batch` rollouts, with agents that may be `ahead` batches ahead of the trainer.

    No step is dropped for its age: the trainer corrects for it.
    """
    return Limits(batch_size=batch, max_staleness=ahead, on_stale="keep")


def pool_with(name: str, limits: Limits) -> "DataPool":
    from stepwell.pool.actors import start_pool
    from stepwell.pool.client import DataPool, PoolClient

    start_pool(PoolPlan(name=name, limits=limits), NAMESPACE)
    return DataPool(PoolClient(name, NAMESPACE))


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


class DemoRun:
    """The parts of a run that are the same for all tasks: engines, pool, and the process of the agents."""

    engine_logs: tuple[str, ...] = ("vllm.log",)
    """A log for each engine."""
    agents_log, agents_module = "agents.log", "stepwell.demo.agent_process"
    lesson = "the format from right and wrong examples"
    """What the warm-up teaches."""
    others = "gateway and agents"
    """What the agents' process has in it, and what starts beside it."""
    concurrency = 64
    """Rollouts, or users, at a time."""
    turns = ""
    """The file for what users see."""

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

    def _teach(self, model: "Qwen2ForCausalLM") -> None:
        task = TASKS[self._name]
        warm_up(model, shown(task, split(task, self._seed)[0], self._seed))

    def _start_parts(self, stack: ExitStack, limits: Limits) -> None:
        """Engines and agents may still be starting: see `_wait`."""
        self._model, say = make_model(self._seed), self._screen.say
        self._like = write_model(self._model, self._out / "model")  # the engines are started on this folder
        self._engines = [
            stack.enter_context(start_engine(self._like, python=self._python, log=self._out / log))
            for log in self.engine_logs
        ]
        self._urls = tuple(engine.url for engine in self._engines)
        vllms = "vLLM is" if len(self._urls) == 1 else "two vLLMs are"
        say(f"{vllms} starting; meanwhile the model learns {self.lesson}")
        self._teach(self._model)
        say(f"pool, {self.others} are starting")
        address = stack.enter_context(demo_ray())
        self._pool = pool_with(POOL, limits)
        orders = Orders(
            task=self._name,
            seed=self._seed,
            engine=",".join(self._urls),
            tokenizer=str(self._like),
            data_pool_name=POOL,
            ray_address=address,
            ray_namespace=NAMESPACE,
            concurrency=self.concurrency,
            turns=self.turns and str(self._out / self.turns),
        )
        agents = start_agents(orders, log=self._out / self.agents_log, module=self.agents_module)
        self._agents = stack.enter_context(agents)

    def _wait(self) -> None:
        for engine in self._engines:
            engine.wait(self._screen.say)
        self._agents.wait()
        self._screen.say(f"{'vLLM is' if len(self._urls) == 1 else 'the vLLMs are'} up on {' and '.join(self._urls)}")


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
        settings = Settings(updates=self._updates, learning_rate=RATE)
        self._start_parts(stack, demo_limits(batch=settings.groups * GROUP, ahead=AHEAD))
        self._wait()
        transfer = CheckpointTransfer(self._out / "weights", like=self._like)
        sync = WeightSync(self._urls, transfer=transfer, pool=self._pool, timeout=START_TIMEOUT)
        stack.callback(sync.close)  # before Ray ends: its thread asks the pool
        self._metrics: list[UpdateMetrics] = []
        reports: list[Report] = [ToJsonl(self._out / METRICS), self._metrics.append]
        trainer = AsyncTrainer(self._pool, self._model, settings=settings, sync=sync, reports=reports)
        trainer.start()
        return trainer, self._agents

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
