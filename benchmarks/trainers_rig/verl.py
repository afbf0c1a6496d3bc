"""verl's V1 trainer, with the mode `stepwell` and with rows that are in its own TransferQueue from the start.

Each run is a command of its own, with verl's own times: `timing_s/step`, and `timing_s/gen` of it, in which it samples.
They are medians over the updates. verl takes a minute to start, so there are few rounds.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks.trainers_rig.row import TrainerRow
from benchmarks.trainers_rig.stage import TRAINED, Stage
from benchmarks.trainers_rig.timed_run import Length, Round, TimedRun
from benchmarks.truth_rig.other_trainers import CHECKOUT
from rig.ray_nodes import joined_node
from rig.trainers.verl_run import PATHS, RESOURCES, start_verl
from rig.waiting import wait_until

RATE = 1e-4
ROUNDS, UPDATES = 3, 20
TIMEOUT, END_TIMEOUT = 1200.0, 60.0
"""Seconds for one run, and for Ray to end its processes."""
TOKENS = 256
"""More than a prompt or a response has."""
MODES = "benchmarks.trainers_rig.programs.verl_modes"
MODULES = f"stepwell_verl_cpu,stepwell.trainers.verl.trainer_mode,{MODES}"
VARIABLES = "ray_kwargs.ray_init.runtime_env.env_vars"


def measure(stage: Stage, length: Length) -> list[Round]:
    length = replace(length, rounds=min(length.rounds, ROUNDS), updates=min(length.updates, UPDATES))
    with joined_node(**RESOURCES):
        return [_round(stage, length, channel) for channel in stage.fill("verl", length.rounds)]


def _round(stage: Stage, length: Length, channel: str) -> Round:
    return Round(
        _run(stage, length, f"{channel}-pool", _pool(stage, channel)),
        _run(stage, length, f"{channel}-memory", _memory(stage)),
    )


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
        f"++{VARIABLES}.VERL_USE_EXTERNAL_MODULES": json.dumps(MODULES),
        "actor_rollout_ref.actor.optim.lr": RATE,
        "actor_rollout_ref.actor.ppo_mini_batch_size": length.groups,
        "algorithm.norm_adv_by_std_in_grpo": False,  # else two small constants beside the deviation differ
        "data.train_batch_size": length.groups,
        "data.max_prompt_length": TOKENS,
        "data.max_response_length": TOKENS,
        "trainer.total_training_steps": length.all_updates,
        **source,
    }
    folder = stage.folder / name
    folder.mkdir()
    run = start_verl(stage.ray_address, overrides, model=stage.model_folder, folder=folder, name="verl")
    metrics = run.wait(TIMEOUT)
    wait_until(lambda: not _has_queue(), "Ray to end verl's processes", END_TIMEOUT)
    return timed_run(metrics, length)


def timed_run(metrics: list[dict[str, Any]], length: Length) -> TimedRun:
    """From what verl tells of its steps."""
    measured = metrics[length.unmeasured :]
    assert len(measured) == length.updates, metrics
    return TimedRun(
        samples=length.updates * length.samples,
        seconds=length.updates * median(told["timing_s/step"] for told in measured),
        waited=length.updates * median(told["timing_s/gen"] for told in measured),
        losses=[told["actor/pg_loss"] for told in metrics],
    )


def _has_queue() -> bool:
    """verl's TransferQueue, which has one name in a cluster."""
    from ray.util import list_named_actors

    return any(actor["namespace"] == "transfer_queue" for actor in list_named_actors(all_namespaces=True))


VERL = TrainerRow("verl", measure, environment="verl")
