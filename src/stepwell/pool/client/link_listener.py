"""The door of a link for other machines: who may come in, and what may be asked for.

- A connection has some seconds and few bytes for TLS and for its proof of the secret (network_link.py). Until then it
  is a stranger: there are few at a time, and a new one takes the place of the oldest.
- Only the calls of gateways, dashboards and Atropos servers go through, to the shards of one pool. Nothing here
  removes data, changes the shards, or reaches another actor.
"""

import asyncio
import hmac
import logging
import os
import re
import socket
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from stepwell.errors import BadRequest
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
from stepwell.pool.client.link_messages import NO_CALL, LinkState, frame
from stepwell.pool.shard.operation import Operation, ShardRoute

log = logging.getLogger("stepwell.pool")

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
"""As a probe does that looks whether somebody listens."""
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
