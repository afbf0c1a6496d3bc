"""What all trainers of the benchmark share: a model, its recorded rollouts, and a pool that is filled with them.

- The rollouts went through a real gateway, as agents made them.
- The engine is a real vLLM with the demo's warmed-up model; in the short form the fake engine.
- No agent runs while trainers are compared.
"""

import asyncio
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.learning_rig.rig import SEED, TASK, open_rig, settings
from benchmarks.trainers_rig.live import LiveLength, measure_live
from benchmarks.trainers_rig.recorded import RecordedRollout, Recording, learnable_groups
from benchmarks.trainers_rig.timed_run import Length
from rig.fake_engine import FakeEngine, Faults
from rig.threads import in_thread
from rig.tiny_model import make_tiny_model
from stepwell.demo.agent_process import AgentProcess, Orders, start_agents
from stepwell.demo.model import write_model
from stepwell.demo.run import NAMESPACE, demo_ray, pool_with
from stepwell.pool.api.plan import Limits
from stepwell.pool.client import DataPool, PoolClient

if TYPE_CHECKING:
    import torch

RECORDED, TRAINED = "recorded", "trained"
"""Pools: the one that agents filled, and the one that trainers lease from."""
UNPACED = 10_000
"""Batches that agents may be ahead while they are recorded."""
AT_ONCE = 4
"""Groups fetched at a time while agents are recorded."""
TIMEOUT = 600.0
"""Seconds for them, on a busy machine."""


@dataclass(frozen=True, slots=True)
class Stage:
    folder: Path
    model_folder: Path
    """The policy that sampled, complete, in Hugging Face's form."""
    recording: Recording
    pool: DataPool
    ray_address: str
    namespace: str = NAMESPACE

    def model(self) -> "torch.nn.Module":
        """Each time a new copy."""
        import torch
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.model_folder, dtype=torch.float32)

    def fill(self, trainer: str, rounds: int) -> list[str]:
        """The names of new channels with all rollouts, one a round."""
        channels = [f"{trainer}{number}" for number in range(rounds)]
        client = PoolClient(TRAINED, self.namespace)

        async def fill_all() -> None:
            for channel in channels:
                await self.recording.fill(client, channel)

        asyncio.run(fill_all())
        return channels

    def plain_rows_file(self) -> Path:
        """A pickled list of PlainRow."""
        file = self.folder / "rows.pickle"
        if not file.exists():
            file.write_bytes(pickle.dumps(list(self.recording.rows())))
        return file


@contextmanager
def open_stage(folder: Path, length: Length, live: LiveLength) -> "Iterator[tuple[Stage, dict[str, float]]]":
    """With a real vLLM. Also gives what was measured while agents used it."""
    with open_rig(folder) as rig:
        figures = measure_live(rig, live)
        with rig.run(RECORDED, settings(1, length.groups), ahead=UNPACED) as run:
            groups = record(run.agents, DataPool(PoolClient(RECORDED, NAMESPACE)), length)
        model_folder = write_model(rig.model, folder / "sampled")
        pool = pool_with(TRAINED, Limits())
        yield Stage(folder, model_folder, Recording(groups), pool, rig.ray_address), figures


@contextmanager
def open_short_stage(folder: Path, length: Length) -> Iterator[Stage]:
    """With the fake engine."""
    model_folder = make_tiny_model(folder / "tiny")
    with demo_ray() as address, in_thread(FakeEngine()) as engine:
        engine.faults = Faults(ignore_seed=True)  # else the rollouts of a group are the same, and teach nothing
        recorded = pool_with(RECORDED, Limits())
        orders = Orders(
            task=TASK,
            seed=SEED,
            engine=engine.url,
            tokenizer=str(model_folder),
            data_pool_name=RECORDED,
            ray_address=address,
            ray_namespace=NAMESPACE,
        )
        module = "benchmarks.trainers_rig.short_agents"
        with start_agents(orders, log=folder / "agents.log", module=module) as agents:
            agents.wait()
            groups = record(agents, recorded, length)
        yield Stage(folder, model_folder, Recording(groups), pool_with(TRAINED, Limits()), address)


def record(agents: AgentProcess, pool: DataPool, length: Length) -> Sequence[Sequence[RecordedRollout]]:
    """As many groups as a round needs."""
    wanted, groups = length.all_groups, list[Sequence[RecordedRollout]]()
    agents.train()
    while len(groups) < wanted:
        groups += learnable_groups(pool.fetch_batch(AT_ONCE, timeout=TIMEOUT))
    agents.stop()
    return groups[:wanted]
