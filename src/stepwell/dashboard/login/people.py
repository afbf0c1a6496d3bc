"""Who may log in, and as what: lists of mail addresses, and of groups as group:NAME.

- A mail address counts only if the provider says that it is verified.
- A name is one that a person cannot choose freely: the verified address, else the provider's own id (`sub`).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stepwell.access.caller import Role

GROUP = "group:"
PLAIN = re.compile(r"[ -~]{1,255}")
"""The form of a name: it is shown, and written into logs."""

Claims = Mapping[str, Any]
"""The provider's statements about a person."""


@dataclass(frozen=True, slots=True)
class ListedPerson:
    name: str
    entry: str
    """The entry of the lists by which the person is let in."""


class ListedPeople:
    def __init__(self, viewers: Sequence[str], curators: Sequence[str]) -> None:
        """Who is on both lists is a curator."""
        self._roles = {_comparable(entry): Role.VIEWER for entry in viewers}
        self._roles |= {_comparable(entry): Role.CURATOR for entry in curators}

    def find(self, claims: Claims) -> ListedPerson | None:
        """None if the person is on no list."""
        name = name_of(claims)
        entries = [entry for entry in _entries(claims) if entry in self._roles]
        if not name or not entries:
            return None
        curating = [entry for entry in entries if self._roles[entry] is Role.CURATOR]
        return ListedPerson(name, (curating or entries)[0])

    def role(self, entry: str) -> Role | None:
        """None if the entry is on no list."""
        return self._roles.get(entry)


def name_of(claims: Claims) -> str:
    """Empty if there is none that can be used."""
    name = _verified_mail(claims) or claims.get("sub")
    return name if isinstance(name, str) and PLAIN.fullmatch(name) else ""


def _entries(claims: Claims) -> Iterator[str]:
    if mail := _verified_mail(claims):
        yield mail
    groups = claims.get("groups")
    if isinstance(groups, list):
        yield from (f"{GROUP}{group}" for group in groups if isinstance(group, str))


def _verified_mail(claims: Claims) -> str:
    """The verified mail address, in lower case. Empty if there is none; one beyond ASCII may look like another, and is
    none."""
    mail = claims.get("email")
    is_usable = isinstance(mail, str) and "@" in mail and PLAIN.fullmatch(mail) and claims.get("email_verified") is True
    return str(mail).lower() if is_usable else ""


def _comparable(entry: str) -> str:
    return entry if entry.startswith(GROUP) else entry.lower()
