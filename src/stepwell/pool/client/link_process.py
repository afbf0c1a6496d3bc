"""The process at the other end of a link: it joins Ray, and calls actors for its parent, and for others that connect.

- It ends when its parent and all others on this machine have ended. Signals to end are for them; they still drain
  through the link.
- It ends when Ray's head has lost its state, because it may still reach the actors of before, but not those that
  replace them; and when the Ray node of this machine has ended. Its parent starts another one.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import uvloop

from stepwell import logs
from stepwell.common.message_codec import MalformedMessage
from stepwell.errors import BadRequest, RayRefused, RayUnreachable, StepwellError
from stepwell.pool.api.transport import ActorTransport
from stepwell.pool.client.link_messages import (
    BUFFER,
    NO_CALL,
    STARTING,
    STATE_INTERVAL,
    GatheringTransport,
    LinkAnswer,
    LinkCall,
    LinkState,
    PackedMessage,
    frame,
    open_stream,
    read_frame,
)
from stepwell.pool.client.ray_cluster import join_ray, why_no_cluster
from stepwell.pool.shard.ray_transport import RayTransport, listens, wait_until_head_loses_state

JOIN_PAUSE = 0.5
"""Seconds between two looks whether there is a cluster."""
THREADS = 64
"""Enough for questions that wait for a head, one for each actor, and for the watch."""
log = logging.getLogger("stepwell.pool")

READY = "__ray_ready__"
"""The one call of Ray's own that a client may make. With others it could end an actor."""
LEAVE_TIMEOUT = 3.0
"""Seconds in which this process leaves Ray; after that it just ends."""


class LinkServer:
    """Answers the calls of its parent, and of other processes that connect to its listener."""

    def __init__(self, address: str, namespace: str, network: NetworkTerms | None = None) -> None:
        """With `network`, the listener is one that other machines reach."""
        self._address = address
        self._namespace = namespace
        self._network = network
        self._state = STARTING
        self._transport: ActorTransport = GatheringTransport(RayTransport(namespace))
        self._answering: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        """One for each process that is connected."""
        self._all_left = asyncio.Event()
        self._server: asyncio.Server | None = None
        """Kept here, because uvloop's server listens only as long as somebody holds it."""

    async def run(self, end: socket.socket, listener: socket.socket | None = None) -> bool:
        """Until the parent and all others have ended, or Ray is lost. Returns whether Ray can be left in order."""
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS))
        serving = asyncio.create_task(self._serve(*await open_stream(end)))
        using_ray = asyncio.create_task(self._use_ray())
        works = [using_ray, *map(asyncio.create_task, (self._await_leave(serving), self._tell_state()))]
        if listener is not None and self._network is None:
            self._server = await asyncio.start_unix_server(self._serve, sock=listener, limit=BUFFER)
        elif listener is not None and self._network is not None:
            calls = NetworkCalls(self._network.pool, self._transport)
            door = LinkListener(self._network, partial(self._serve, transport=calls))
            works.append(asyncio.create_task(door.run(listener)))
        done, _ = await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
        for work in done:
            work.result()
        return using_ray not in done

    async def _await_leave(self, parent: "asyncio.Task[None]") -> None:
        await parent
        while self._writers and self._network is None:
            self._all_left.clear()
            await self._all_left.wait()

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, transport: ActorTransport | None = None
    ) -> None:
        """Until the process at the other end leaves."""
        self._writers.add(writer)
        questions: set[asyncio.Task[None]] = set()
        writer.writelines(frame(NO_CALL, self._state))
        try:
            while True:
                number, packed = await read_frame(reader)
                try:
                    call = _read_call(packed)
                except StepwellError as refusal:
                    writer.writelines(frame(number, LinkAnswer(None, refusal)))
                    continue
                answering = asyncio.create_task(self._answer(writer, number, call, transport or self._transport))
                self._answering.add(answering)
                answering.add_done_callback(self._answering.discard)
                if call.method == "wait_news":
                    questions.add(answering)
                    answering.add_done_callback(questions.discard)
        except MalformedMessage as why:
            log.warning("a connection to the link is closed, because what came over it is no call: %s", why)
        except (OSError, asyncio.IncompleteReadError):
            return
        finally:
            for question in questions:
                question.cancel()
            self._writers.discard(writer)
            writer.close()
            self._all_left.set()

    async def _answer(
        self, writer: asyncio.StreamWriter, number: int, call: LinkCall, transport: ActorTransport
    ) -> None:
        try:
            answered = frame(number, LinkAnswer(await transport.call(*call)))
        except Exception as failure:  # noqa: BLE001 - the parent gets it
            answered = frame(number, LinkAnswer(None, failure))
        writer.writelines(answered)

    async def _tell_state(self) -> None:
        while True:
            self._tell(self._state)
            await asyncio.sleep(STATE_INTERVAL)

    def _tell(self, state: LinkState) -> None:
        self._state = state
        for writer in self._writers:
            writer.writelines(frame(NO_CALL, state))

    async def _use_ray(self) -> None:
        """Join as soon as there is a cluster. Returns when it cannot be used, or not any more."""
        while (missing := await asyncio.to_thread(why_no_cluster, self._address)) is not None:
            self._tell(LinkState(is_joined=False, why=missing))
            await asyncio.sleep(JOIN_PAUSE)
        try:
            await asyncio.to_thread(join_ray, self._address, self._namespace)
        except RayUnreachable as failure:
            self._tell(LinkState(is_joined=False, why=str(failure), is_refused=isinstance(failure, RayRefused)))
            return
        self._tell(LinkState(is_joined=True))
        self._tell(LinkState(is_joined=False, why=await self._watch_cluster()))

    async def _watch_cluster(self) -> str:
        """Returns why the cluster cannot be used any more. While only its head is away, shards can be reached."""
        head, node = await asyncio.to_thread(_addresses)
        loses = asyncio.create_task(asyncio.to_thread(wait_until_head_loses_state))
        while not loses.done():
            if not await asyncio.to_thread(listens, *node):
                return "the Ray node of this machine has ended"
            has_head = await asyncio.to_thread(listens, *head)
            self._tell(LinkState(is_joined=True, why="" if has_head else "Ray's head does not answer"))
            await asyncio.sleep(STATE_INTERVAL)
        loses.result()
        return f"the head of Ray at {self._address} has lost its state"


def _read_call(packed: PackedMessage) -> LinkCall:
    """A StepwellError if the call is refused, MalformedMessage if it is none."""
    call = packed.unpack()
    if type(call) is not LinkCall or not {str}.issuperset(map(type, call.kwargs)):
        raise MalformedMessage(f"a {type(call).__name__} in place of a call")
    if call.method.startswith("_") and call.method != READY:
        raise BadRequest(f"{call.method} is no call that a client may make")
    return call


def _addresses() -> tuple[tuple[str, int], tuple[str, int]]:
    """Host and port of the cluster's head and of this process's node."""
    import ray

    context = ray.get_runtime_context()
    host, _, port = context.gcs_address.rpartition(":")
    own = context.get_node_id()
    (node,) = (node for node in ray.nodes() if node["NodeID"] == own)  # type: ignore[no-untyped-call]
    return (host, int(port)), (node["NodeManagerAddress"], node["NodeManagerPort"])


async def serve(address: str, namespace: str, network: NetworkTerms | None, *ends: socket.socket) -> None:
    if await LinkServer(address, namespace, network).run(*ends) and "ray" in sys.modules:
        threading.Timer(LEAVE_TIMEOUT, os._exit, (1,)).start()
        sys.modules["ray"].shutdown()
    os._exit(0)  # threads may wait for a head that is away


def main() -> None:
    """The arguments: the address, the namespace, the descriptors of one socket or two, and the values of NetworkTerms
    if the second one is for other machines."""
    address, namespace, *more = sys.argv[1:]
    logs.setup(json=os.environ.get("STEPWELL_LOG") == "json")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    network = NetworkTerms(*more[2:]) if more[2:] else None
    uvloop.run(serve(address, namespace, network, *(socket.socket(fileno=int(number)) for number in more[:2])))


if __name__ == "__main__":
    main()
