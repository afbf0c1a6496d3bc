"""A Tinker service, SkyRL's server on a CPU, with TinkerTrainer and with the tinker client alone.

SkyRL's JAX backend knows Qwen3: the service trains a random one of the size of the model that sampled, with the same
vocabulary. How long an update takes does not depend on the weights.
"""

from dataclasses import replace

from benchmarks.trainers_rig.other_environment import run_program
from benchmarks.trainers_rig.row import TrainerRow
from benchmarks.trainers_rig.stage import Stage
from benchmarks.trainers_rig.timed_run import Length, Round
from rig.trainers.skyrl_server import start_skyrl
from stepwell.demo.model import write_model

RANK = 8
ROUNDS, UPDATES = 5, 6
"""An update takes seconds, and the service keeps an adapter for each run."""


def measure(stage: Stage, length: Length) -> list[Round]:
    from rig.two_tenants import new_model

    length = replace(length, rounds=min(length.rounds, ROUNDS), updates=min(length.updates, UPDATES))
    model, adapters = write_model(new_model(), stage.folder / "qwen3"), 2 * length.rounds + 2
    with start_skyrl(model, stage.folder / "skyrl", adapters=adapters, rank=RANK, rows=length.samples) as service:
        more = {"model": str(model), "service": service.url, "rank": RANK, "groups": length.groups}
        return run_program("skyrl", stage, length, name="tinker", more=more)


TINKER = TrainerRow("tinker", measure, environment="skyrl")
