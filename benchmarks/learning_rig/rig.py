"""One engine and one Ray for all that the benchmark runs after the demo: each run gets a pool and agents of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stepwell.demo.agent_process import GROUP, AgentProcess, Orders, start_agents
from stepwell.demo.engine import find_vllm, start_engine
from stepwell.demo.model import make_model, warm_up, write_model
from stepwell.demo.run import NAMESPACE, RATE, demo_limits, demo_ray, pool_with
from stepwell.demo.tasks import TASKS, shown, split
from stepwell.trainers.settings import Settings
from stepwell.trainers.trainer import AsyncTrainer
from stepwell.trainers.transfers import CheckpointTransfer
from stepwell.trainers.weight_sync import WeightSync

if TYPE_CHECKING:
    from transformers import Qwen2ForCausalLM

TASK, SEED = "tool", 0


@dataclass(frozen=True, slots=True)
class Run:
    """Agents and a trainer, which has brought the warmed-up weights to the engine."""

    agents: AgentProcess
    trainer: AsyncTrainer


@dataclass(frozen=True, slots=True)
class Rig:
    engine: str
    ray_address: str
    out: Path
    like: Path
    """The folder that the engine was started on."""
    model: "Qwen2ForCausalLM"
    """After the warm-up."""

    def transfer(self) -> CheckpointTransfer:
        return CheckpointTransfer(self.out / "weights", like=self.like)

    @contextmanager
    def run(
        self,
        name: str,
        settings: Settings,
        *,
        ahead: int,
        concurrency: int = 64,
        module: str = "stepwell.demo.agent_process",
    ) -> Iterator[Run]:
        """Agents that may be `ahead` batches ahead of the trainer, and start from a copy of the warmed-up model."""
        pool = pool_with(name, demo_limits(batch=settings.groups * GROUP, ahead=ahead))
        orders = Orders(
            task=TASK,
            seed=SEED,
            engine=self.engine,
            tokenizer=str(self.like),
            data_pool_name=name,
            ray_address=self.ray_address,
            ray_namespace=NAMESPACE,
            concurrency=concurrency,
        )
        with start_agents(orders, log=self.out / f"{name}.log", module=module) as agents:
            agents.wait()
            # no thread that brings the engine up to date: in turns, another loop has its own weights there
            sync = WeightSync([self.engine], transfer=self.transfer(), pool=pool, background=False)
            trainer = AsyncTrainer(pool, deepcopy(self.model), settings=settings, sync=sync)
            trainer.start()
            yield Run(agents, trainer)


@contextmanager
def open_rig(out: Path) -> Iterator[Rig]:
    import torch

    torch.set_num_threads(1)
    task, model = TASKS[TASK], make_model(SEED)
    like = write_model(model, out / "model")
    with start_engine(like, python=find_vllm(None), log=out / "vllm.log") as engine, demo_ray() as address:
        warm_up(model, shown(task, split(task, SEED)[0], SEED))
        engine.wait()
        yield Rig(engine.url, address, out, like, model)


def settings(updates: int, groups: int, *, rate: float = RATE) -> Settings:
    return Settings(updates=updates, groups=groups, learning_rate=rate)
