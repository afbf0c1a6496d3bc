"""The process at the other end of a link: it joins Ray, and calls actors for its parent, and for others that connect.

- It ends when its parent and all others on this machine have ended. Signals to end are for them; they still drain
  through the link.
- It ends when Ray's head has lost its state, because it may still reach the actors of before, but not those that
  replace them; and when the Ray node of this machine has ended. Its parent starts another one.
- A connection from another machine has some seconds and few bytes for TLS and for its proof of the secret (link.py).
  Until then it is a stranger: there are few at a time, and a new one takes the place of the oldest.
- Only the calls of gateways, dashboards and Atropos servers come over a network, to the shards of one pool. Nothing of
  that removes data, changes the shards, or reaches another actor.
"""

import asyncio
import hmac
import logging
import os
import re
import signal
import socket
import ssl
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import uvloop

from stepwell import logs
from stepwell.common.message_codec import MalformedMessage
from stepwell.errors import BadRequest, RayRefused, RayUnreachable, StepwellError
from stepwell.pool.api.transport import ActorTransport
from stepwell.pool.client.link import (
    CONNECT_TIMEOUT,
    GREETING,
    NONCE_BYTES,
    PROOF_BYTES,
    Streams,
    proof_of,
    read_secrets,
)
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
from stepwell.pool.shard.operation import Operation, ShardRoute
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

GATEWAY_CALLS = (*("plan", "adopt_plan", "run", "run_flushed", "serving", "pacing", "wait_news", "flushed", "leave"),)
DASHBOARD_CALLS = ("stats", "changes", "read", "preview")
ATROPOS_CALLS = (
    *("offers", "fill", "take_offers", "renew", "ack", "ack_several", "settle", "nack", "put_back"),
    *("ready_groups", "clear"),
)
NETWORK_CALLS = frozenset((*GATEWAY_CALLS, *DASHBOARD_CALLS, *ATROPOS_CALLS))
MOST_STRANGERS = 64
STRANGER_BUFFER = 2**14
"""Bytes that a stream reads ahead, at most twice of it. A message that is larger is read as it comes."""
ACCEPT_PAUSE = 0.005
"""Seconds between two connections: a handshake takes a millisecond of CPU or two."""
REFUSAL_PAUSE = 1.0
"""Seconds before a wrong proof is answered."""
LOG_PAUSE = 5.0
UNANSWERED = 30_000
"""Milliseconds after which the connection to a machine that answers no packet ends."""
LEFT = "it left before it showed the secret"
"""A probe that only looks whether somebody listens leaves in this way."""
WRONG_SECRET = (
    "the link does not know this secret: --link-secret-file must have a secret that is also in the --secret-file of "
    "`stepwell link`"
)


class NetworkTerms(NamedTuple):
    """With what a link listens to other machines."""

    pool: str
    tls_cert: str
    tls_key: str
    secret_file: str


class LinkListener:
    """Lets those in who know the secret. Files are read when it is made."""

    def __init__(
        self, terms: NetworkTerms, serve: Callable[..., Awaitable[None]], *, patience: float = CONNECT_TIMEOUT
    ) -> None:
        """`serve` gets the reader and the writer of one that was let in."""
        self.refused: Counter[str] = Counter()
        """Connections since the start, by cause."""
        self._secrets = read_secrets(terms.secret_file)
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.minimum_version = ssl.TLSVersion.TLSv1_3
        self._tls.load_cert_chain(terms.tls_cert, terms.tls_key)
        self._serve = serve
        self._patience = patience
        self._strangers: dict[asyncio.Task[None], None] = {}
        """The oldest first."""
        self._guests: set[asyncio.Task[None]] = set()
        self._logging: asyncio.TimerHandle | None = None

    async def run(self, listener: socket.socket) -> None:
        """Until cancelled."""
        listener.setblocking(False)
        while True:
            try:
                end, (host, *_) = await asyncio.get_running_loop().sock_accept(listener)
            except OSError as failure:  # as without a free descriptor
                self._refuse(f"it could not be accepted ({failure.strerror})", "?")
                await asyncio.sleep(REFUSAL_PAUSE)
                continue
            if len(self._strangers) >= MOST_STRANGERS:
                next(iter(self._strangers)).cancel()
            stranger = asyncio.create_task(self._meet(end, host))
            self._strangers[stranger] = None
            self._guests.add(stranger)
            stranger.add_done_callback(self._guests.discard)
            await asyncio.sleep(ACCEPT_PAUSE)

    async def _meet(self, end: socket.socket, host: str) -> None:
        streams = None
        try:
            async with asyncio.timeout(self._patience):
                streams = await self._secure(end)
                why = None if await self._proves(*streams) else "it does not know the secret"
        except asyncio.CancelledError:
            why = "too many had not shown the secret yet"
        except TimeoutError:
            why = f"it did not show the secret within {self._patience:g} s"
        except ssl.SSLError:
            why = "it does not speak TLS 1.3, or does not trust the certificate"
        except (OSError, asyncio.IncompleteReadError):
            why = LEFT
        finally:
            self._strangers.pop(asyncio.current_task(), None)  # type: ignore[arg-type]
        if why is None and streams is not None:
            await self._serve(*streams)
            return
        self._refuse(why or "", host)
        if streams is not None:
            streams[1].transport.abort()
        end.close()

    async def _secure(self, end: socket.socket) -> Streams:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNANSWERED)
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(STRANGER_BUFFER, loop)
        transport, protocol = await loop.connect_accepted_socket(
            lambda: asyncio.StreamReaderProtocol(reader, loop=loop),
            end,
            ssl=self._tls,
            ssl_handshake_timeout=self._patience,
        )
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)

    async def _proves(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        nonce = os.urandom(NONCE_BYTES)
        writer.write(GREETING + nonce)
        proof = await reader.readexactly(PROOF_BYTES)
        matches = [hmac.compare_digest(proof, proof_of(secret, nonce)) for secret in self._secrets]
        if any(matches):
            return True
        await asyncio.sleep(REFUSAL_PAUSE)
        writer.writelines(frame(NO_CALL, LinkState(is_joined=False, why=WRONG_SECRET, is_refused=True)))
        await writer.drain()
        return False

    def _refuse(self, why: str, host: str) -> None:
        """A line for the first one, and one for all that follow within some seconds."""
        self.refused[why] += 1
        if self._logging is None and why != LEFT:
            log.warning("a connection of %s to the link is closed: %s", host, why)
            self._logging = asyncio.get_running_loop().call_later(LOG_PAUSE, self._tell, self.refused.total())

    def _tell(self, told: int) -> None:
        self._logging = None
        if self.refused.total() > told:
            counts = ", ".join(f"{count} × {why}" for why, count in self.refused.items())
            log.warning("connections to the link that were closed since its start: %s", counts)


class NetworkCalls:
    """The calls that may come over a network. Implements ActorTransport."""

    def __init__(self, pool: str, transport: ActorTransport) -> None:
        self._pool = pool
        self._shard = re.compile(rf"{re.escape(pool)}(-\d+)?")
        self._transport = transport

    @property
    def connections(self) -> int:
        return self._transport.connections

    async def call(self, actor: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if not self._shard.fullmatch(actor):
            raise BadRequest(
                f"{actor!r} is no shard of DataPool {self._pool!r}, which is all that this link leads to: other pools "
                "need a link of their own, reward workers and other actors a process on a machine of the Ray cluster"
            )
        for refused in _refused(method, args):
            raise BadRequest(
                f"{refused} is no call that a link over a network carries: make it on a machine of the Ray cluster"
            )
        if method == "adopt_plan":  # a client may bring a newer plan to a shard, but not decide which one
            args = [await self._transport.call(self._pool, "plan", (), {})]
        return await self._transport.call(actor, method, args, kwargs)


def _refused(method: str, args: Sequence[Any]) -> Iterator[str]:
    """The names of what may not come over a network. Operations about a group are calls of gateways."""
    if method not in NETWORK_CALLS:
        yield method
    elif method in ("run", "run_flushed"):
        is_list = method == "run" and bool(args) and isinstance(args[0], list)
        for operation in args[0] if is_list else args[:1]:
            if not isinstance(operation, Operation):
                yield "what is no operation"
            elif not (operation.over_network or operation.route is ShardRoute.GROUP):
                yield type(operation).__name__


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
