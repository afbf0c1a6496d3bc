"""What the door must not forget when it is killed: who registered, and how far training is.

What always holds: the file is whole at any moment, the last version or the one before; whoever waited for `save` has on
disk what was true when it was called. The data itself is the pool's to keep.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

from stepwell.common.atomic_files import replacing_file
from stepwell.errors import BadRequest
from stepwell.wire.atropos_calls import DoorState, read_call


class StateFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._writing = asyncio.Lock()
        self._wanted = 0
        self._written = 0

    def load(self) -> DoorState:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if not self._path.exists():
            return DoorState(channels={})
        try:
            return read_call(DoorState, self._path.read_bytes())
        except BadRequest as wrong:
            raise BadRequest(f"{self._path} is no state of a door, move it away to begin anew: {wrong}") from None

    async def save(self, state: Callable[[], DoorState]) -> None:
        """Those who come while one is writing share the next writing."""
        self._wanted += 1
        mine = self._wanted
        async with self._writing:
            if self._written >= mine:
                return
            now = self._wanted
            await asyncio.to_thread(self._replace, state().model_dump_json().encode())
            self._written = now

    def _replace(self, text: bytes) -> None:
        with replacing_file(self._path) as file:
            file.write(text)
