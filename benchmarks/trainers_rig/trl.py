"""TRL's AsyncGRPOTrainer, with Stepwell's rollout worker and with a queue that is full from the start."""

from benchmarks.trainers_rig.other_environment import run_program
from benchmarks.trainers_rig.row import TrainerRow
from benchmarks.trainers_rig.stage import Stage
from benchmarks.trainers_rig.timed_run import Length, Round


def measure(stage: Stage, length: Length) -> list[Round]:
    return run_program("trl", stage, length, name="trl")


TRL = TrainerRow("trl", measure, environment="trl")
