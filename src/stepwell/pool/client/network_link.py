"""A link over a network, for processes on machines without Ray: the client's side, and the handshake.

- TLS 1.3. The client checks the certificate, and then proves that it knows the pool's secret.
- The proof is an HMAC of a nonce that the link makes for this connection. The secret never travels, and a proof that
  somebody recorded is of no use.
- Nothing that a client sends before its proof is read as a message.
"""

import asyncio
import hmac
import ssl
from collections.abc import Sequence
from pathlib import Path

from stepwell.common.async_calls import Backoff
from stepwell.common.listening import READABLE_BY_ALL
from stepwell.errors import BadRequest
from stepwell.pool.client.link import FIRST_STATE_TIMEOUT, LinkClient, Streams
from stepwell.pool.client.link_messages import BUFFER, STARTING, LinkState, read_frame

GREETING = b"stepwell link 1\n"
NONCE_BYTES = PROOF_BYTES = 32
SHORTEST_SECRET = 32
"""Characters."""
CONNECT_TIMEOUT = 10.0
"""Seconds from the first packet to the proof."""
RECONNECT_PAUSES = Backoff(first=0.5, longest=8.0, jitter=0.5)
MAKE_A_SECRET = "make one with: openssl rand -hex 32"


def proof_of(secret: str, nonce: bytes) -> bytes:
    return hmac.digest(secret.encode(), GREETING + nonce, "sha256")


def read_secrets(file: str) -> Sequence[str]:
    """Those of a file, one in each line. Clients use the first one. BadRequest if the file is no place for secrets."""
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


class NetworkLink(LinkClient):
    """To the process of `stepwell link` on a machine of the Ray cluster."""

    def __init__(self, host: str, port: int, *, secret_file: str, ca_file: str | None = None) -> None:
        """BadRequest if a file cannot be used. Without a CA, the certificate must be of one that the system trusts."""
        super().__init__(NetworkEnds(host, port, read_secrets(secret_file)[0], ca_file), backoff=RECONNECT_PAUSES)
