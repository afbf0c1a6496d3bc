"""Seals the uid of a step into texts that a client sends back: ids, signatures, encrypted content.

A sealed uid in a request proves which step the client continues. No other process than a gateway with the same control
key can make one. Without control keys the seal only tells Stepwell's texts from those of others.
"""

import hmac
from base64 import urlsafe_b64encode

from stepwell.access.access_keys import AccessKeys

DOMAIN = b"stepwell step seal 1\0"
UID_LENGTH = 32
MAC_BYTES = 12
SEALED_LENGTH = UID_LENGTH + MAC_BYTES * 4 // 3
SEPARATOR = "-"
"""The separator between a text and the seal that is attached to it."""


class StepSeal:
    def __init__(self, keys: AccessKeys) -> None:
        self._secrets = keys.secrets(DOMAIN)

    def seal(self, uid: str) -> str:
        """Letters, digits, - and _. The same for every call with this uid."""
        return uid + _mac(self._secrets[0], uid)

    def opened(self, text: str) -> str | None:
        """The uid that ends `text`, whatever stands before it; None if there is none, or its seal is not ours."""
        sealed = text[-SEALED_LENGTH:]
        uid, mac = sealed[:UID_LENGTH], sealed[UID_LENGTH:]
        if len(sealed) < SEALED_LENGTH or not sealed.isascii():
            return None
        return uid if any(hmac.compare_digest(mac, _mac(secret, uid)) for secret in self._secrets) else None

    def attach(self, text: str, uid: str) -> str:
        """`text`, such as the engine's id of a tool call, with the sealed uid after it."""
        return text + SEPARATOR + self.seal(uid)

    def detach(self, text: str) -> tuple[str, str | None]:
        """The text and the uid that `attach` was given. A text without our seal stays whole, and its uid is None."""
        uid = self.opened(text)
        return (text, None) if uid is None else (text[: -SEALED_LENGTH - len(SEPARATOR)], uid)


def _mac(secret: bytes, uid: str) -> str:
    return urlsafe_b64encode(hmac.digest(secret, uid.encode(), "sha256")[:MAC_BYTES]).decode()


OPEN_SEAL = StepSeal(AccessKeys(()))
"""The seal of gateways without control keys."""
