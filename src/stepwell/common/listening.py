"""Where a server listens, under which names it answers, and what pages of other sites cannot make a browser send to it.

- Without keys it listens on loopback only, unless its operator says that the network keeps others out.
- Without keys it answers only to names that no other site can have: a page whose own name begins to point to this
  machine (DNS rebinding) is told by that name, which the browser sends as Host. With keys it answers to any name,
  unless names are listed: such a page has no key.
- A page of another site cannot read an answer, but it can send requests to any server that the browser reaches. A
  browser says in Origin and Sec-Fetch-Site where a request comes from, and no page can change them. A request that may
  change something must come from the server's own page, or from a program, which sends neither.
- A page may send forms and plain text anywhere; for JSON its browser first asks the server, which does not answer that
  question. So a body must have a type that the server documents.
"""

import random
import re
import socket
import ssl
import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from stepwell.errors import BadRequest, CrossSite, NotReady, StepwellError, UnsupportedMediaType, WrongHost

LINK = "link://"
"""Begins the address of a link over the network, where otherwise Ray's stands."""
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
ALL_ADDRESSES = ("0.0.0.0", "::", "")
HOST_HEADER = re.compile(rb"(?:\[([0-9a-f:.]+)\]|([a-z0-9_.\-]+?)\.?)(?::\d{1,5})?")
MOST_KNOWN = 1_000
READABLE_BY_ALL = stat.S_IRWXO | stat.S_IWGRP

Headers = Sequence[tuple[bytes, bytes]]

JSON = b"application/json"
READING = frozenset(("GET", "HEAD", "OPTIONS"))
OWN_SITES = (None, b"same-origin", b"none")
"""Sec-Fetch-Site of a program, of the server's own page, and of an address that a person typed."""
STATUS: Mapping[type[StepwellError], int] = {CrossSite: 403, UnsupportedMediaType: 415, WrongHost: 421}
LONGEST_SHOWN = 80
CHILD_PORTS = (26_000, 32_000)
"""Above the ports of Ray's workers, below those that systems give to connections."""
PORT_TRIES = 100


def is_loopback(host: str) -> bool:
    return host == "localhost" or ((address := _address(host)) is not None and address.is_loopback)


def is_safe_url(url: str) -> bool:
    """True of https, and of http to this machine: nobody between can read or change what is sent."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        return False
    return bool(host) and (parts.scheme == "https" or (parts.scheme == "http" and is_loopback(host)))


def require_safe_address(host: str, *, has_keys: bool, insecure: bool, variable: str) -> None:
    """BadRequest if others could reach a server that lets everyone in. `variable` takes its keys."""
    if not (has_keys or insecure or is_loopback(host)):
        raise BadRequest(
            f"listening on {host} without keys would let everyone who reaches it do everything: set {variable}, or "
            "listen on 127.0.0.1, or give --insecure if nobody else reaches that address"
        )


def read_host_and_port(address: str) -> tuple[str, int]:
    """Reads HOST:PORT or SCHEME://HOST:PORT. ValueError says what is wrong."""
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        if parts.hostname and parts.port and not (parts.path or parts.query or parts.username):
            return parts.hostname, parts.port
    except ValueError:
        pass
    raise ValueError(f"{address!r} names no host and port; write host:port")


def free_port(host: str) -> int:
    """A port that is free now, and that no connection gets from the system before a child listens there."""
    for port in random.sample(range(*CHILD_PORTS), k=PORT_TRIES):
        with suppress(OSError), socket.create_server((host, port)):
            return port
    first, end = CHILD_PORTS
    raise NotReady(f"{PORT_TRIES} of the ports {first} to {end - 1} of {host} were tried, and none is free")


class ServedHosts:
    """The names by which a server may be asked. Use `in` with the value of a header Host."""

    def __init__(self, names: Iterable[str] = (), *, any_address: bool = False) -> None:
        """Loopback's names are always among them. `any_address`: every IP address too, which no site has as a name."""
        self._names = frozenset((*LOOPBACK_NAMES, *(name.strip("[]").rstrip(".").lower() for name in names)))
        self._any_address = any_address
        self.known: set[bytes] = set()
        """Values that were found to be served: most requests come with one of them."""

    @classmethod
    def of(cls, host: str, allowed: Sequence[str]) -> Self:
        """The names of a server that listens on `host` and has these further names."""
        own = () if is_loopback(host) else (host, socket.gethostname())
        return cls((*own, *allowed), any_address=host in ALL_ADDRESSES)

    def __contains__(self, header: bytes) -> bool:
        if header in self.known:
            return True
        is_served = self._is_served(header)
        if is_served and len(self.known) < MOST_KNOWN:
            self.known.add(header)
        return is_served

    def _is_served(self, header: bytes) -> bool:
        found = HOST_HEADER.fullmatch(header.lower())
        if found is None:
            return False
        name = (found[1] or found[2]).decode()
        if name in self._names:
            return True
        address = _address(name)
        return address is not None and (self._any_address or address.is_loopback)


def served_hosts(host: str, allowed: Sequence[str], *, has_keys: bool) -> ServedHosts | None:
    """None: any name."""
    return None if has_keys and not allowed else ServedHosts.of(host, allowed)


LOOPBACK_HOSTS = ServedHosts()


def check_certificate(certificate: str, key: str) -> str | None:
    """BadRequest if a server cannot use these files for TLS. Returns what is wrong with the mode of the key's file."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=lambda: "")
        mode = Path(key).stat().st_mode
    except OSError as failure:  # also ssl.SSLError
        why = failure.strerror or str(failure)
        raise BadRequest(
            f"--tls-cert {certificate} and --tls-key {key} cannot be used: {why}. The first is a PEM file with the "
            "certificate and those between it and the CA, the second one with its key, not encrypted"
        ) from None
    if mode & READABLE_BY_ALL:
        return f"{key} can be read or changed by other users (its mode is {stat.S_IMODE(mode):04o}): chmod 600 {key}"
    return None


def _address(name: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(name)
    except ValueError:
        return None


class CrossSiteCheck:
    """Called for every request before anything reads it."""

    def __init__(
        self,
        hosts: ServedHosts | None = LOOPBACK_HOSTS,
        types: Iterable[bytes] = (JSON,),
        *,
        gets_change: bool = False,
    ) -> None:
        """Without `hosts`, all names are served. `types` are those of bodies, in lower case. `gets_change`: a GET may
        change something too."""
        self._hosts = hosts
        self._types = frozenset(types)
        self._harmless = frozenset() if gets_change else READING

    def check(self, method: str, headers: Headers) -> None:
        """WrongHost, CrossSite or UnsupportedMediaType if the request is refused."""
        given = dict(headers)
        host = given.get(b"host")
        if host is not None and self._hosts is not None and host not in self._hosts:
            raise WrongHost(
                f"this server does not answer to the name {_shown(host)}; ask 127.0.0.1 or localhost, or start it with "
                "--allowed-hosts NAME"
            )
        if method in self._harmless:
            return
        origin = given.get(b"origin")
        if given.get(b"sec-fetch-site") not in OWN_SITES or (origin is not None and not _is_of(origin, host)):
            raise CrossSite(
                "a page of another site sent this request, and it may change something; only this server's own pages "
                "and programs may do that. A proxy must pass on the header Host"
            )
        if method in READING or given.get(b"content-type") in self._types:
            return
        self._check_type(given)

    def _check_type(self, given: Mapping[bytes, bytes]) -> None:
        kind = given.get(b"content-type", b"")
        has_body = b"transfer-encoding" in given or given.get(b"content-length", b"0") != b"0"
        if has_body and kind.partition(b";")[0].strip().lower() not in self._types:
            wanted = " or ".join(f"Content-Type: {one.decode()}" for one in sorted(self._types))
            said = _shown(kind) if kind else "none"
            raise UnsupportedMediaType(f"send the body with the header {wanted} (the type of this one is {said})")


def _is_of(origin: bytes, host: bytes | None) -> bool:
    """Whether a page of that origin came from that host. The scheme may differ: a proxy may end TLS."""
    return host is not None and origin.partition(b"://")[2].lower() == host.lower() != b""


def _shown(value: bytes) -> str:
    return repr(value[:LONGEST_SHOWN].decode("latin-1"))
