"""The ids of sessions, and the prompt_uids that are made of them."""

import hmac
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from secrets import token_hex

from stepwell.errors import BadRequest
from stepwell.gateway.calls import Unrecorded
from stepwell.pool.api.producing import TrajectoryRef
from stepwell.pool.api.sessions import RESERVED_UIDS, SESSION_MARK, SESSION_PREFIX
from stepwell.wire.gateway_api import UID_PATTERN

UNRECORDED_PREFIXES: Mapping[str, Unrecorded] = {
    f"unrecorded{SESSION_MARK}": Unrecorded.SESSION,
    f"unsampled{SESSION_MARK}": Unrecorded.SAMPLE,
}
"""How the prompt_uids of sessions begin that are not recorded. The pool does not know them."""
RESERVED_PREFIXES = (SESSION_PREFIX, *UNRECORDED_PREFIXES)
LONGEST_ID = 128 - max(map(len, RESERVED_PREFIXES))
"""The prompt_uid of a session is longer than its id."""
HALF_AN_ID = 8
"""Bytes."""
SESSION_IDS = b"stepwell session ids 1\0"
"""Separates these HMACs from other uses of the same secret."""


class SessionIds:
    """Makes the ids of sessions. One that is opened for a person whose data was deleted has an HMAC in its id: each
    gateway with the same control keys sees that its calls are not to be recorded, and nobody else can tell it from
    other ids."""

    def __init__(self, secrets: Sequence[bytes] = (b"",), sample: float = 1.0) -> None:
        """The first secret makes ids; all are accepted. `sample` is the share of sessions that are recorded."""
        self._secrets = secrets
        self._sample = sample

    def new(self) -> str:
        return token_hex(2 * HALF_AN_ID)

    def new_unrecorded(self) -> str:
        """An id for a session that is not recorded. It is in the share that is: another one would give itself away."""
        while True:
            nonce = token_hex(HALF_AN_ID)
            session_id = nonce + _seal(self._secrets[0], nonce)
            if self.is_sampled(session_id):
                return session_id

    def is_unrecorded(self, session_id: str) -> bool:
        nonce, seal = session_id[: 2 * HALF_AN_ID], session_id[2 * HALF_AN_ID :]
        if len(seal) != 2 * HALF_AN_ID or not session_id.isascii():
            return False
        return any(hmac.compare_digest(_seal(secret, nonce), seal) for secret in self._secrets)

    def is_sampled(self, name: str) -> bool:
        """Whether the session is recorded. The same for the same name, at every gateway with the same share."""
        number = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big")
        return number < self._sample * 2**64


@lru_cache(maxsize=10_000)
def _seal(secret: bytes, nonce: str) -> str:
    return hmac.digest(secret, nonce.encode(), "sha256")[:HALF_AN_ID].hex()


def session_id_by_name(name: str) -> str:
    """The name itself if it can stand in a URL, so that whoever knows it finds the session; else its digest."""
    if len(name) <= LONGEST_ID and re.fullmatch(UID_PATTERN, name) and name not in RESERVED_UIDS:
        return name
    return blake2b(name.encode(), digest_size=16).hexdigest()


def check_uids(ref: TrajectoryRef) -> None:
    """BadRequest if the URL lacks a uid, so that another part of it stands in its place."""
    for uid in (ref.trajectory_uid, ref.prompt_uid):
        if uid in RESERVED_UIDS:
            raise BadRequest(
                f"the URL has {uid!r} in the place of a uid; a base_url is .../TRAJECTORY_UID/PROMPT_UID, as POST "
                "/init_trajectory answers it, with or without /v1 at its end"
            )
