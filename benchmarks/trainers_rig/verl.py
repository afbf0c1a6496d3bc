"""verl's V1 trainer, with the mode `stepwell` and with rows that are in its own TransferQueue from the start.

Each run is a command of its own, with verl's own times: `timing_s/step`, and `timing_s/gen` of it, in which it samples.
"""

from collections.abc import Mapping
from typing import Any

from benchmarks.trainers_rig.row import TrainerRow
from benchmarks.trainers_rig.stage import TRAINED, Stage
from benchmarks.trainers_rig.timed_run import Length, Round, TimedRun
from benchmarks.truth_rig.other_trainers import CHECKOUT
from tests.rig.ray_nodes import joined_node
from tests.rig.trainers.verl_run import PATHS, RESOURCES, start_verl

RATE = 1e-5
TIMEOUT = 1200.0
"""Seconds for one run."""
TOKENS = 256
"""More than a prompt or a response has."""
MODES = "benchmarks.trainers_rig.programs.verl_modes"
MODULES = f"stepwell_verl_cpu,stepwell.trainers.verl.plugin,{MODES}"
VARIABLES = "ray_kwargs.ray_init.runtime_env.env_vars"


def measure(stage: Stage, length: Length) -> list[Round]:
    with joined_node(**RESOURCES):
        return [
            Round(_run(stage, length, channel, _pool(stage, channel)), _run(stage, length, "memory", _memory(stage)))
            for channel in stage.fill("verl", length.rounds)
        ]


def _pool(stage: Stage, channel: str) -> dict[str, object]:
    return {
        "trainer.v1.stepwell.pool": TRAINED,
        "trainer.v1.stepwell.namespace": stage.namespace,
        "trainer.v1.stepwell.channel": channel,
    }


def _memory(stage: Stage) -> dict[str, object]:
    return {
        "trainer.v1.trainer_mode": "from_memory",
        "trainer.v1.sampler.custom_sampler.path": f"pkg://{MODES}",
        "trainer.v1.sampler.custom_sampler.name": "MemorySampler",
        "+trainer.v1.from_memory.rows": stage.plain_rows_file(),
    }


def _run(stage: Stage, length: Length, name: str, source: Mapping[str, object]) -> TimedRun:
    overrides = {
        f"+{VARIABLES}.PYTHONPATH": f"{PATHS}:{CHECKOUT}",
        f"{VARIABLES}.VERL_USE_EXTERNAL_MODULES": f'"{MODULES}"',
        "actor_rollout_ref.model.path": stage.model_folder,
        "actor_rollout_ref.actor.optim.lr": RATE,
        "actor_rollout_ref.actor.ppo_mini_batch_size": length.groups,
        "data.train_batch_size": length.groups,
        "data.max_prompt_length": TOKENS,
        "data.max_response_length": TOKENS,
        "trainer.total_training_steps": length.all_updates,
        **source,
    }
    folder = stage.folder / f"verl-{name}-{len(list(stage.folder.glob('verl-*')))}"
    folder.mkdir()
    metrics = start_verl(stage.ray_address, overrides, folder=folder, name="verl").wait(TIMEOUT)
    return _timed(metrics, length)


def _timed(metrics: list[dict[str, Any]], length: Length) -> TimedRun:
    measured = metrics[length.unmeasured :]
    assert len(measured) == length.updates, metrics
    return TimedRun(
        samples=length.updates * length.samples,
        seconds=sum(told["timing_s/step"] for told in measured),
        waited=sum(told["timing_s/gen"] for told in measured),
        losses=[told["actor/pg_loss"] for told in metrics],
    )


VERL = TrainerRow("verl", measure, environment="verl")
