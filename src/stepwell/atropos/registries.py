"""The registries of all channels, and their file."""

from collections.abc import Iterator

from stepwell.atropos.registry import Registry
from stepwell.atropos.state import StateFile
from stepwell.wire.atropos_calls import DoorState


class Registries:
    def __init__(self, file: StateFile | None, now: float) -> None:
        self._file = file
        self._channels: dict[str, Registry] = {}
        for channel, state in (file.load().channels if file else {}).items():
            self.open(channel).restore(state, now)

    def open(self, channel: str) -> Registry:
        return self._channels.setdefault(channel, Registry())

    def of(self, channel: str) -> Registry:
        """The channel's, or an empty one that is not kept: no one has registered there."""
        return self._channels.get(channel) or Registry()

    def forget(self, channel: str) -> None:
        self._channels.pop(channel, None)

    async def save(self) -> None:
        if self._file is not None:
            await self._file.save(self._state)

    def steps(self) -> Iterator[tuple[str, float]]:
        return ((channel, registry.step) for channel, registry in self._channels.items())

    def connected(self, now: float) -> Iterator[tuple[str, float]]:
        for channel, registry in self._channels.items():
            yield channel, sum(known.is_connected(now) for known in registry.environments)

    def _state(self) -> DoorState:
        return DoorState(channels={channel: registry.state() for channel, registry in self._channels.items()})
