"""The trainers and environments that registered, by channel, and the file that keeps them over a restart.

Invariants:
- A Registry knows no clock and no pool: callers pass the time and the number of ready groups.
- The name of an environment is unique in its channel.
- An environment that was silent for SILENCE seconds, or disconnected, has no weight and no share.
- The step rises by one for each delivered batch, and for no other reason.
- The file is always complete: it holds the last state or the one before. When `save` returns, the state of the moment
  when it was called is on disk.
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from stepwell.common.files import replacing_file
from stepwell.errors import BadRequest
from stepwell.pool.api.leasing import ReadyGroups
from stepwell.wire.scored_groups import EnvRegistration, EnvStatus, TrainerRegistration, read_call

SILENCE = 300.0
"""Seconds after which a silent environment does not count, until it calls again."""
LEAST_WEIGHT = 0.01
"""The least weight, so that every environment gets some rollouts."""


@dataclass(slots=True, eq=False)
class RegisteredEnv:
    name: str
    """Unique in its channel; the source of its groups."""
    wanted: EnvRegistration
    is_disconnected: bool = False
    heard_at: Annotated[float, Field(exclude=True)] = 0.0
    """The time of the last call. It is not in the file: after a restart, an environment has SILENCE seconds to call."""

    def is_connected(self, now: float) -> bool:
        return not self.is_disconnected and now - self.heard_at <= SILENCE

    @property
    def token_weight(self) -> float:
        return self.wanted.max_token_length * max(0.0, self.wanted.weight)


@dataclass(slots=True, eq=False)
class Registry:
    """One channel."""

    trainer: TrainerRegistration | None = None
    is_started: bool = False
    """Whether the trainer has asked for a batch."""
    step: int = 0
    environments: list[RegisteredEnv] = field(default_factory=list)
    """The environments by number."""

    def register(self, trainer: TrainerRegistration) -> None:
        """The same registration again changes nothing. A different one replaces it and sets the step."""
        if trainer != self.trainer:
            self.trainer = trainer
            self.step = trainer.starting_step

    def register_env(self, wanted: EnvRegistration, now: float) -> RegisteredEnv:
        same_name = sum(known.wanted.desired_name == wanted.desired_name for known in self.environments)
        environment = RegisteredEnv(f"{wanted.desired_name}_{same_name}", wanted, heard_at=now)
        self.environments.append(environment)
        return environment

    def heard_from(self, env_id: int | None, now: float) -> RegisteredEnv | None:
        """Note that the environment called; None if no environment has this number."""
        if env_id is None or not 0 <= env_id < len(self.environments):
            return None
        self.environments[env_id].heard_at = now
        return self.environments[env_id]

    def shares(self, now: float) -> dict[str, float]:
        """The minimum shares of a batch, by source."""
        return {
            known.name: known.wanted.min_batch_allocation
            for known in self.environments
            if known.is_connected(now) and known.wanted.min_batch_allocation
        }

    def weight(self, environment: RegisteredEnv, now: float) -> float:
        total = sum(known.token_weight for known in self.environments if known.is_connected(now))
        return max(LEAST_WEIGHT, environment.token_weight / total) if total > 0 else LEAST_WEIGHT

    def env_status(self, environment: RegisteredEnv, ready: ReadyGroups, now: float) -> EnvStatus:
        shares = self.shares(now)
        own = ready.trajectories_of(environment.name)
        group_size = max(environment.wanted.group_size, *ready.groups.get(environment.name, ()), 1)
        others = sum(self._unclaimed(source, shares, ready) for source in ready.groups if source != environment.name)
        return EnvStatus(
            current_step=self.step,
            queue_size=(own + others) // group_size,
            unallocated_fraction=1.0 - min(1.0, sum(shares.values())),
            self_queue_size=own // group_size,
            max_group_size=max(1, ready.largest),
            env_weight=self.weight(environment, now),
        )

    def _unclaimed(self, source: str, shares: dict[str, float], ready: ReadyGroups) -> int:
        """Sequences of a source beyond what its own minimum takes from the next batch, in whole groups."""
        largest = max(1, ready.largest)
        in_whole_groups = -(-ready.trajectories_of(source) // largest) * largest
        batch_size = 0 if self.trainer is None else self.trainer.batch_size
        return max(0, in_whole_groups - int(batch_size * shares.get(source, 0.0)))


class RegistryState(BaseModel):
    """The state file."""

    channels: dict[str, Registry]


class Registries:
    """All channels."""

    def __init__(self, file: "RegistryFile | None", now: float) -> None:
        self._file = file
        self._channels = file.load().channels if file else {}
        for registry in self._channels.values():
            for known in registry.environments:
                known.heard_at = now

    def open(self, channel: str) -> Registry:
        return self._channels.setdefault(channel, Registry())

    def of(self, channel: str) -> Registry:
        """The channel's registry; an empty one that is not kept if nobody has registered."""
        return self._channels.get(channel) or Registry()

    def reset(self, channel: str) -> None:
        self._channels[channel] = Registry()

    async def save(self) -> None:
        if self._file is not None:
            await self._file.save(self._state)

    def steps(self) -> Iterator[tuple[str, float]]:
        return ((channel, registry.step) for channel, registry in self._channels.items())

    def connected(self, now: float) -> Iterator[tuple[str, float]]:
        """Connected environments, by channel."""
        for channel, registry in self._channels.items():
            yield channel, sum(known.is_connected(now) for known in registry.environments)

    def _state(self) -> RegistryState:
        return RegistryState(channels=self._channels)


class RegistryFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._writing = asyncio.Lock()
        self._requested = 0
        self._written = 0

    def load(self) -> RegistryState:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if not self._path.exists():
            return RegistryState(channels={})
        try:
            return read_call(RegistryState, self._path.read_bytes())
        except BadRequest as fault:
            raise BadRequest(
                f"{self._path} is not a state file of stepwell atropos; move it away to start anew: {fault}"
            ) from None

    async def save(self, state: Callable[[], RegistryState]) -> None:
        """Callers that come during a write share the next one."""
        self._requested += 1
        own = self._requested
        async with self._writing:
            if self._written >= own:
                return
            covered = self._requested
            await asyncio.to_thread(self._replace, state().model_dump_json().encode())
            self._written = covered

    def _replace(self, text: bytes) -> None:
        with replacing_file(self._path) as file:
            file.write(text)
