"""The link to Ray: a process that joins Ray in place of this process, on this machine or on another one.

Ray ends a process that has joined it when the head is away for a minute, or when the node of the process dies. And a
process that has joined a cluster cannot use the next one at the same address. A gateway must survive all of these.

- A link that has ended is started again. Calls in flight raise ActorAway, and their callers repeat them.
- A link that is silent is killed.
- A link ends with the process that started it, because it sees the end of its socket.
- Several processes can share a link: one starts it with a listening socket, the others connect to that.
- Over a network, the client checks the certificate by TLS 1.3, and then proves that it knows the pool's secret, by an
  HMAC of a nonce that the link makes for this connection. The secret never travels, and a proof that somebody recorded
  is of no use. Nothing that a client sends before its proof is read as a message.
"""

import asyncio
import hmac
import logging
import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from stepwell.common.async_calls import Backoff
from stepwell.common.listening import READABLE_BY_ALL
from stepwell.errors import BadRequest, RayUnreachable, StepwellError
from stepwell.pool.api.transport import ActorAway, ActorFailed
from stepwell.pool.client.link_messages import (
    BUFFER,
    NO_CALL,
    STARTING,
    LinkAnswer,
    LinkCall,
    LinkState,
    PackedMessage,
    frame,
    open_stream,
    read_frame,
    read_frame_blocking,
)

log = logging.getLogger("stepwell.pool")

FIRST_STATE_TIMEOUT = 60.0
SILENCE = 20.0
"""Seconds without a word after which a link is killed. On a busy machine, importing Ray takes some of them."""
RESTART_PAUSES = Backoff(first=1.0, longest=1.0)
CLOSE_TIMEOUT = 2.0
"""Seconds in which the other side of a connection must agree that it is closed."""
HEADLESS_TIMEOUT = 1.0
"""Seconds that a call takes at most while Ray's head is away: an actor that runs answers, for another one Ray waits."""

Streams: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]

GREETING = b"stepwell link 1\n"
NONCE_BYTES = PROOF_BYTES = 32
SHORTEST_SECRET = 32
"""Characters."""
CONNECT_TIMEOUT = 10.0
"""Seconds from the first packet to the proof."""
RECONNECT_PAUSES = Backoff(first=0.5, longest=8.0, jitter=0.5)
MAKE_A_SECRET = "make one with: openssl rand -hex 32"


class LinkEnds(Protocol):
    """Where the connection to a link process comes from."""

    def first_state(self) -> LinkState:
        """Connects, and waits until the process has tried to join. STARTING if it does not say so in time."""

    async def connect(self) -> Streams:
        """A new connection; at first that of `first_state`, if it is kept. OSError if there is none now."""

    def close(self) -> None:
        """The last connection is of no use any more."""


class SocketEnds:
    """Connections that are sockets of this machine."""

    def __init__(self) -> None:
        self._unserved: socket.socket | None = None
        """A connection that nobody has taken yet."""

    def open(self) -> socket.socket:
        """A new connection. OSError if there is none now."""
        raise NotImplementedError

    def first_state(self) -> LinkState:
        self._unserved = self.open()
        self._unserved.settimeout(FIRST_STATE_TIMEOUT)
        state = STARTING
        try:
            while state == STARTING:
                state = read_frame_blocking(self._unserved)
        except OSError:
            return STARTING
        return state

    async def connect(self) -> Streams:
        end, self._unserved = self._unserved or self.open(), None
        return await open_stream(end)

    def close(self) -> None:
        if self._unserved is not None:
            self._unserved.close()
            self._unserved = None


class OwnLinkProcess(SocketEnds):
    """A child process for each connection. With a listener, it serves other processes too."""

    def __init__(
        self, address: str, namespace: str, listener: socket.socket | None = None, network: Sequence[str] = ()
    ) -> None:
        super().__init__()
        self.process: subprocess.Popen[bytes] | None = None
        self._command = (sys.executable, "-m", "stepwell.pool.client.link_process", address, namespace)
        self._listener = listener
        self._network = network

    def open(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            passed = [end.fileno() for end in (theirs, self._listener) if end is not None]
            for descriptor in passed:
                os.set_inheritable(descriptor, True)
            self.process = subprocess.Popen(
                (*self._command, *map(str, passed), *self._network),
                stdin=subprocess.DEVNULL,
                pass_fds=passed,
                start_new_session=True,  # a Ctrl-C is for this process alone, which drains through the link
            )
        return ours

    def close(self) -> None:
        super().close()
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


class SharedLinkProcess(SocketEnds):
    """The link that another process has started, and keeps running."""

    def __init__(self, path: str) -> None:
        """`path` is that of the unix socket at which the link listens."""
        super().__init__()
        self._path = path

    def open(self) -> socket.socket:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            end.connect(self._path)
        except OSError:
            end.close()
            raise
        return end


def proof_of(secret: str, nonce: bytes) -> bytes:
    return hmac.digest(secret.encode(), GREETING + nonce, "sha256")


def read_secrets(file: str) -> Sequence[str]:
    """Reads a file of secrets, one on each line. Clients use the first. BadRequest if it is unsafe or unreadable."""
    try:
        mode = Path(file).stat().st_mode
        secrets = Path(file).read_text().split()
    except (OSError, UnicodeDecodeError) as failure:
        raise BadRequest(f"the secret of a link cannot be read from {file}: {failure}; {MAKE_A_SECRET}") from None
    if mode & READABLE_BY_ALL:
        raise BadRequest(
            f"{file} has the secret of a link, and other users can read or change it (its mode is "
            f"{mode & 0o7777:04o}): chmod 600 {file}"
        )
    if not secrets or min(map(len, secrets)) < SHORTEST_SECRET:
        raise BadRequest(
            f"a secret in {file} has less than {SHORTEST_SECRET} characters, so that it could be guessed; "
            f"{MAKE_A_SECRET}"
        )
    return secrets


class NetworkEnds:
    """Implements LinkEnds."""

    def __init__(self, host: str, port: int, secret: str, ca_file: str | None) -> None:
        self._host, self._port = host, port
        self._secret = secret
        try:
            self._tls = ssl.create_default_context(cafile=ca_file)
        except OSError as failure:  # also ssl.SSLError
            raise BadRequest(
                f"--link-ca-file {ca_file} is no PEM file with a certificate: {failure.strerror or failure}"
            ) from None
        self._tls.minimum_version = ssl.TLSVersion.TLSv1_3

    def first_state(self) -> LinkState:
        """The connection is not kept: it would belong to another event loop."""
        return asyncio.run(self._first_state())

    async def _first_state(self) -> LinkState:
        state = STARTING
        try:
            reader, writer = await self.connect()
            try:
                async with asyncio.timeout(FIRST_STATE_TIMEOUT):
                    while state == STARTING:
                        state = (await read_frame(reader))[1].unpack()
            finally:
                writer.transport.abort()
        except ssl.SSLCertVerificationError as failure:
            return LinkState(is_joined=False, why=str(failure), is_refused=True)
        except (OSError, asyncio.IncompleteReadError):
            return STARTING
        return state

    async def connect(self) -> Streams:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                return await self._connect()
        except TimeoutError:
            raise TimeoutError(f"{self._host}:{self._port} did not answer within {CONNECT_TIMEOUT:g} s") from None
        except asyncio.IncompleteReadError:
            raise ConnectionError(f"{self._host}:{self._port} closed the connection") from None
        except ssl.SSLCertVerificationError as failure:
            failure.strerror = (
                f"the certificate of the link at {self._host}:{self._port} is not trusted: {failure.verify_message}. "
                "Name its CA with --link-ca-file, and the link by a name that the certificate has"
            )
            raise ssl.SSLCertVerificationError(failure.strerror) from None

    async def _connect(self) -> Streams:
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=BUFFER)
        try:
            hello = await reader.readexactly(len(GREETING) + NONCE_BYTES)
            if not hello.startswith(GREETING):
                raise ConnectionError(f"{self._host}:{self._port} is no link of this release of Stepwell")
            writer.write(proof_of(self._secret, hello[len(GREETING) :]))
        except BaseException:
            writer.transport.abort()
            raise
        return reader, writer

    def close(self) -> None:
        """Nothing is kept here."""


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
        writer = self._writer
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        if writer is not None:
            await _closed(writer)
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


class NetworkLink(LinkClient):
    """To the process of `stepwell link` on a machine of the Ray cluster."""

    def __init__(self, host: str, port: int, *, secret_file: str, ca_file: str | None = None) -> None:
        """BadRequest if a file cannot be used. Without a CA, the certificate must be of one that the system trusts."""
        super().__init__(NetworkEnds(host, port, read_secrets(secret_file)[0], ca_file), backoff=RECONNECT_PAUSES)


async def _closed(writer: asyncio.StreamWriter) -> None:
    """Waits until a connection is closed: over TLS, both sides say so first."""
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT):
            await writer.wait_closed()
    except (OSError, TimeoutError):
        writer.transport.abort()
        await asyncio.sleep(0)  # the transport closes its socket in the next round of the event loop


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
