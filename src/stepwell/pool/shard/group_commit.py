"""One commit for all calls that are under way at the same time: a commit that waits for the disk stays cheap."""

import asyncio
from collections.abc import Callable

from stepwell.errors import PoolUnavailable


class GroupCommit:
    def __init__(self, commit: Callable[[], None], on_failure: Callable[[Exception], None]) -> None:
        """After a failure it is not known what the journal has: nothing is committed any more."""
        self._commit = commit
        self._on_failure = on_failure
        self._waiting: list[asyncio.Future[None]] = []
        self._failure: Exception | None = None

    async def committed(self) -> None:
        """Return when all changes so far are committed."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._commit_all)  # after all calls that can run now
        self._waiting.append(done)
        await done

    def _commit_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        if self._failure is None:
            try:
                self._commit()
            except Exception as failure:  # noqa: BLE001 - whatever it is, memory and journal differ from now on
                self._failure = failure
                self._on_failure(failure)
        for done in waiting:
            if not done.done():  # a call that was cancelled
                if self._failure is None:
                    done.set_result(None)
                else:
                    done.set_exception(PoolUnavailable(f"the journal failed: {self._failure}"))
