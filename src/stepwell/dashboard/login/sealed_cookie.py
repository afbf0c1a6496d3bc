"""A cookie that only this dashboard can read and make: encrypted and signed (Fernet), with an end. Nothing is stored.

- JavaScript does not see it, and a browser sends it with no request of another site, except when a person follows a
  link or a redirect to the dashboard (SameSite=Lax): that is how a provider sends them back.
- Under https its name begins with __Host-: a browser takes it only from this host itself, over https.
"""

import json
import time
from base64 import urlsafe_b64encode
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from starlette.requests import HTTPConnection
from starlette.responses import Response

HOST_PREFIX = "__Host-"


class SealedCookie:
    def __init__(
        self, name: str, secrets: Sequence[bytes], seconds: int, *, clock: Callable[[], float] = time.time
    ) -> None:
        """Values are sealed with the first secret, and opened with any. Each has 32 bytes."""
        self._name = name
        self._fernet = MultiFernet([Fernet(urlsafe_b64encode(secret)) for secret in secrets])
        self._seconds = seconds
        self._clock = clock

    def read(self, connection: HTTPConnection, *, is_https: bool) -> dict[str, Any] | None:
        """None if there is none, or one that is forged or too old."""
        sealed = connection.cookies.get(self._full_name(is_https))
        if sealed is None:
            return None
        try:
            opened = self._fernet.decrypt_at_time(sealed.encode(), self._seconds, int(self._clock()))
        except InvalidToken:
            return None
        value: dict[str, Any] = json.loads(opened)
        return value

    def write(self, response: Response, value: Mapping[str, Any], *, is_https: bool) -> None:
        sealed = self._fernet.encrypt_at_time(json.dumps(value).encode(), int(self._clock())).decode()
        self._set(response, sealed, self._seconds, is_https)

    def remove(self, response: Response, *, is_https: bool) -> None:
        self._set(response, "", 0, is_https)

    def _set(self, response: Response, text: str, seconds: int, is_https: bool) -> None:
        response.set_cookie(
            self._full_name(is_https), text, max_age=seconds, path="/", secure=is_https, httponly=True, samesite="lax"
        )

    def _full_name(self, is_https: bool) -> str:
        return f"{HOST_PREFIX}{self._name}" if is_https else self._name
