"""What asyncio would print of failures that nobody has asked for."""

import asyncio
import gc
from typing import Any

from rig.waiting import until


class Complaints:
    """Of the running loop, from now on."""

    def __init__(self) -> None:
        self._noted: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self._noted.append(context))

    async def when_all_has_ended(self) -> list[dict[str, Any]]:
        """Asyncio complains when a task is deleted, so the caller must hold none."""
        await until(lambda: asyncio.all_tasks() == {asyncio.current_task()}, "the end of all tasks")
        gc.collect()
        return self._noted
