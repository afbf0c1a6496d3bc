"""The link to Ray: a process that joins Ray in place of this process.

Ray ends a process that has joined it when the head is away for a minute, or when the node of the process dies. And a
process that has joined a cluster cannot use the next one at the same address. A gateway must survive all of these.

- A link that has ended is started again. Calls in flight raise ActorAway, and their callers repeat them.
- A link that is silent is killed.
- A link ends with the process that started it, because it sees the end of its socket.
- Several processes can share a link: one starts it with a listening socket, the others connect to that.
"""

import asyncio
import logging
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from stepwell.common.retry import Backoff
from stepwell.errors import RayUnreachable, StepwellError
from stepwell.pool.api.transport import ActorAway, ActorFailed
from stepwell.pool.client.link_ends import LinkEnds, OwnLinkProcess, SharedLinkProcess
from stepwell.pool.client.link_messages import (
    NO_CALL,
    STARTING,
    LinkAnswer,
    LinkCall,
    LinkState,
    PackedMessage,
    frame,
    read_frame,
)

log = logging.getLogger("stepwell.pool")

SILENCE = 20.0
"""Seconds without a word after which a link is killed. On a busy machine, importing Ray takes some of them."""
RESTART_PAUSES = Backoff(first=1.0, longest=1.0)
HEADLESS_TIMEOUT = 1.0
"""Seconds that a call takes at most while Ray's head is away: an actor that runs answers, for another one Ray waits."""


class LinkClient:
    """Calls actors by name. Implements ActorTransport; its calls belong to one event loop."""

    def __init__(self, ends: LinkEnds, *, silence: float = SILENCE, backoff: Backoff = RESTART_PAUSES) -> None:
        self.starts = 0
        """How often it was connected to a process."""
        self._ends = ends
        self._silence = silence
        self._backoff = backoff
        """Between two connections."""
        self._state = STARTING
        self._lost_at: float | None = time.monotonic()
        self._writer: asyncio.StreamWriter | None = None
        self._numbers = count(NO_CALL + 1)
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._opened = asyncio.Event()
        """The first process is served."""
        self._keeping: asyncio.Task[None] | None = None

    @property
    def is_joined(self) -> bool:
        """Ray is joined, and its head answers."""
        return self._state.is_joined and not self._state.why

    @property
    def connections(self) -> int:
        return self.starts

    @property
    def waiting(self) -> int:
        """Calls without an answer."""
        return len(self._calls)

    def start(self) -> None:
        """Start the process and wait until it has tried to join. If Ray is away, the link waits for it afterwards.

        RayUnreachable if Ray does not let the link in.
        """
        state = self._ends.first_state()
        if state.is_refused:
            self._ends.close()
            raise RayUnreachable(state.why)
        self._note(state)

    async def call(self, actor: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.keep_running()
        await self._opened.wait()
        if self._writer is None or not self._state.is_joined:
            raise ActorAway(self._state.why)
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        try:
            self._writer.writelines(frame(number, LinkCall(actor, method, list(args), kwargs)))
            async with asyncio.timeout(HEADLESS_TIMEOUT if self._state.why else None):
                return await answer
        except TimeoutError:
            raise ActorAway(self._state.why) from None
        finally:
            self._calls.pop(number, None)

    def keep_running(self) -> None:
        """From now on in this event loop; the first call does it too."""
        if self._keeping is None:
            self._keeping = asyncio.create_task(self._keep_running())

    async def close(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        self._ends.close()

    async def _keep_running(self) -> None:
        pauses = self._backoff.pauses()
        while True:
            try:
                reader, self._writer = await self._ends.connect()
            except OSError as failure:
                self._note(LinkState(is_joined=False, why=f"there is no link to Ray: {failure}"))
                self._opened.set()
                await asyncio.sleep(next(pauses))
                continue
            self.starts += 1
            self._opened.set()
            try:
                await self._serve(reader)
            except TimeoutError:
                self._note(LinkState(is_joined=False, why=f"its link to Ray was silent for {self._silence:g} s"))
            except (OSError, asyncio.IncompleteReadError):
                why = self._state.why or "the link to Ray has ended, as when Ray's head or node is lost"
                self._note(LinkState(is_joined=False, why=why))
            except Exception:  # whatever it is, the next link may work
                log.exception("the link to Ray failed")
                self._note(LinkState(is_joined=False, why="the link to Ray failed"))
            finally:
                self._writer.close()
                self._writer = None
                self._ends.close()
                self._fail_calls()
            pauses = self._backoff.pauses()
            await asyncio.sleep(next(pauses))

    async def _serve(self, reader: asyncio.StreamReader) -> None:
        while True:
            async with asyncio.timeout(self._silence):
                number, packed = await read_frame(reader)
            if number == NO_CALL:
                self._note(packed.unpack())
            elif (answer := self._calls.get(number)) is not None and not answer.done():
                _settle(answer, packed)

    def _note(self, state: LinkState) -> None:
        if state == STARTING:
            return  # why the one before it ended says more
        now = time.monotonic()
        if not state.why and self._lost_at is not None:
            log.info("Ray is joined after %.0f s", now - self._lost_at)
            self._lost_at = None
        elif state.why and state.why != self._state.why:
            self._lost_at = self._lost_at or now
            log.warning("Ray is away: %s", state.why)
        self._state = state

    def _fail_calls(self) -> None:
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(ActorAway(self._state.why))


class RayLink(LinkClient):
    """With a process of its own, which other processes may share by connecting to `listener`."""

    def __init__(
        self,
        address: str,
        namespace: str,
        *,
        listener: socket.socket | None = None,
        network: Sequence[str] = (),
        silence: float = SILENCE,
    ) -> None:
        """`network` are the values of NetworkTerms, for a listener that other machines reach."""
        self._own = OwnLinkProcess(address, namespace, listener, network)
        super().__init__(self._own, silence=silence)

    @property
    def process(self) -> "subprocess.Popen[bytes] | None":
        return self._own.process


class SharedLink(LinkClient):
    """With the process that another one has started. `path` is that of the unix socket at which it listens."""

    def __init__(self, path: str, *, silence: float = SILENCE) -> None:
        super().__init__(SharedLinkProcess(path), silence=silence)


def _settle(answer: asyncio.Future[Any], packed: PackedMessage) -> None:
    try:
        message: LinkAnswer = packed.unpack()
    except StepwellError as failure:
        message = LinkAnswer(None, failure)
    except Exception as failure:  # noqa: BLE001 - one answer that cannot be read must not end the link
        message = LinkAnswer(None, ActorFailed(f"its answer cannot be read: {failure!r}"))
    if message.failure is None:
        answer.set_result(message.value)
    else:
        answer.set_exception(message.failure)
