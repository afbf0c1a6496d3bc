"""A row of the benchmark: one trainer, measured with a pool and without."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.environments import installed_python
from benchmarks.trainers_rig.stage import Stage
from benchmarks.trainers_rig.timed_run import Length, Round


@dataclass(frozen=True, slots=True)
class TrainerRow:
    name: str
    measure: Callable[[Stage, Length], Sequence[Round]]
    environment: str | None = None
    """Which it runs in, by its name in scripts/trainer_envs.py; None: this one."""

    @property
    def is_installed(self) -> bool:
        return self.environment is None or installed_python(self.environment) is not None
