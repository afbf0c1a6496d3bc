"""Who trains and who sends, in one channel: what they registered, and what follows from it.

Knows no clock and no pool: it is told the time and shown the backlog. What always holds: an environment's name is its
own; one that was silent for SILENCE seconds, or said goodbye, has no weight and no share; the step rises by one for
each batch that was delivered, and for no other reason.
"""

from dataclasses import dataclass

from stepwell.pool.api.leasing import ReadyGroups
from stepwell.wire.atropos_calls import ChannelState, EnvironmentState, EnvRegistration, TrainerRegistration

SILENCE = 300.0
"""Seconds after which an environment that says nothing no longer counts, until it speaks again."""
LEAST_WEIGHT = 0.01
"""So that no environment starves."""


@dataclass(slots=True, eq=False)
class Environment:
    env_id: int
    name: str
    """Unique in its channel; the source of its groups."""
    wanted: EnvRegistration
    heard_at: float
    is_disconnected: bool = False

    def is_connected(self, now: float) -> bool:
        return not self.is_disconnected and now - self.heard_at <= SILENCE

    @property
    def pull(self) -> float:
        return self.wanted.max_token_length * max(0.0, self.wanted.weight)


@dataclass(frozen=True, slots=True)
class Status:
    current_step: int
    queue_size: int
    """Groups."""


@dataclass(frozen=True, slots=True)
class EnvStatus:
    """What an environment paces itself by."""

    current_step: int
    queue_size: int
    """All that waits, less what other environments' minimums claim, in groups of this environment's size."""
    unallocated_fraction: float
    """The share of a batch that no minimum claims."""
    self_queue_size: int
    """Its own groups."""
    max_group_size: int
    env_weight: float


class Registry:
    def __init__(self) -> None:
        self.trainer: TrainerRegistration | None = None
        self.is_started = False
        """Has the trainer asked for a batch?"""
        self.step = 0
        self.environments: list[Environment] = []

    def register(self, trainer: TrainerRegistration) -> None:
        """The same again changes nothing; other values replace what was there, and the steps count anew."""
        if trainer != self.trainer:
            self.trainer = trainer
            self.step = trainer.starting_step

    def register_env(self, wanted: EnvRegistration, now: float) -> Environment:
        namesakes = sum(known.wanted.desired_name == wanted.desired_name for known in self.environments)
        environment = Environment(len(self.environments), f"{wanted.desired_name}_{namesakes}", wanted, now)
        self.environments.append(environment)
        return environment

    def hear(self, env_id: int | None, now: float) -> Environment | None:
        """The environment of that number, which has just spoken."""
        if env_id is None or not 0 <= env_id < len(self.environments):
            return None
        self.environments[env_id].heard_at = now
        return self.environments[env_id]

    def shares(self, now: float) -> dict[str, float]:
        """The minimums, by source."""
        return {
            known.name: known.wanted.min_batch_allocation
            for known in self.environments
            if known.is_connected(now) and known.wanted.min_batch_allocation
        }

    def weight(self, environment: Environment, now: float) -> float:
        total = sum(known.pull for known in self.environments if known.is_connected(now))
        return max(LEAST_WEIGHT, environment.pull / total) if total > 0 else LEAST_WEIGHT

    def status(self, backlog: ReadyGroups) -> Status:
        return Status(self.step, backlog.total_groups)

    def env_status(self, environment: Environment, backlog: ReadyGroups, now: float) -> EnvStatus:
        shares = self.shares(now)
        own = backlog.trajectories_of(environment.name)
        group_size = max(environment.wanted.group_size, *backlog.groups.get(environment.name, ()), 1)
        others = sum(self._spare(source, shares, backlog) for source in backlog.groups if source != environment.name)
        return EnvStatus(
            current_step=self.step,
            queue_size=(own + others) // group_size,
            unallocated_fraction=1.0 - min(1.0, sum(shares.values())),
            self_queue_size=own // group_size,
            max_group_size=max(1, backlog.largest),
            env_weight=self.weight(environment, now),
        )

    def _spare(self, source: str, shares: dict[str, float], backlog: ReadyGroups) -> int:
        """Sequences of a source beyond what its own minimum takes from the next batch, in whole groups."""
        largest = max(1, backlog.largest)
        packed = -(-backlog.trajectories_of(source) // largest) * largest
        batch_size = 0 if self.trainer is None else self.trainer.batch_size
        return max(0, packed - int(batch_size * shares.get(source, 0.0)))

    # -- over a restart ------------------------------------------------------------------------------------------------

    def state(self) -> ChannelState:
        known = tuple(
            EnvironmentState(name=each.name, wanted=each.wanted, is_disconnected=each.is_disconnected)
            for each in self.environments
        )
        return ChannelState(trainer=self.trainer, is_started=self.is_started, step=self.step, environments=known)

    def restore(self, state: ChannelState, now: float) -> None:
        """Everyone who was connected has SILENCE seconds to speak."""
        self.trainer, self.is_started, self.step = state.trainer, state.is_started, state.step
        self.environments = [
            Environment(number, known.name, known.wanted, now, known.is_disconnected)
            for number, known in enumerate(state.environments)
        ]
