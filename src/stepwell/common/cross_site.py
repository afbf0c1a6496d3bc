"""Refuses what a page of another site makes a browser send.

Such a page cannot read the answer, but it can send requests to any server that the browser reaches, this machine
included. Keys do not help a server that has none, or whose password the browser keeps.

- Host: a name that the server does not serve is refused; see common/listening.py.
- Origin and Sec-Fetch-Site: a browser says in them where a request comes from, and no page can change them. A request
  that may change something must come from the server's own page, or from a program, which sends neither.
- Content-Type: a page may send forms and plain text anywhere; for JSON its browser first asks the server, which does
  not answer that question. So a body must have a type that the server documents.
"""

from collections.abc import Iterable, Mapping, Sequence

from stepwell.common.listening import LOOPBACK_HOSTS, ServedHosts
from stepwell.errors import CrossSite, StepwellError, UnsupportedMediaType, WrongHost

Headers = Sequence[tuple[bytes, bytes]]

JSON = b"application/json"
READING = frozenset(("GET", "HEAD", "OPTIONS"))
OWN_SITES = (None, b"same-origin", b"none")
"""Sec-Fetch-Site of a program, of the server's own page, and of an address that a person typed."""
STATUS: Mapping[type[StepwellError], int] = {CrossSite: 403, UnsupportedMediaType: 415, WrongHost: 421}
LONGEST_SHOWN = 80


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
