"""The names of groups: the same group sent again gets the same name, so that the pool takes it once.

A group is known by its Idempotency-Key, for as long as the pool remembers it, or else by its content, for WINDOW
seconds: an environment may well roll out the same tokens again next hour. Knows no clock: it is told the time.
"""

import hashlib
from collections import OrderedDict

import numpy as np
import orjson

from stepwell.wire.scored_groups import ScoredGroup

WINDOW = 120.0
"""Seconds in which the same content is taken for the same group."""
DIGITS = 32


class Repeats:
    def __init__(self) -> None:
        self._seen: OrderedDict[str, tuple[float, str]] = OrderedDict()
        """By content: when it was first seen, and its name. The oldest first."""

    def by_key(self, channel: str, key: str, place: int) -> str:
        """The name of the group at that place in the request with that key."""
        return _digest(orjson.dumps([channel, key, place]))

    def by_content(self, channel: str, group: ScoredGroup, now: float) -> str:
        self._forget(now)
        content = content_digest(channel, group)
        _, name = self._seen.setdefault(content, (now, f"{content}-{now:.3f}"))
        return name

    def clear(self) -> None:
        self._seen.clear()

    def _forget(self, now: float) -> None:
        while self._seen and next(iter(self._seen.values()))[0] < now - WINDOW:
            self._seen.popitem(last=False)


def content_digest(channel: str, group: ScoredGroup) -> str:
    small = [channel, group.env_id, group.extras, list(group.extras_N), list(group.policy_versions), group.lengths_N]
    arrays = [group.tokens, group.trained, group.scores_N] + ([] if group.logprobs is None else [group.logprobs])
    parts = [np.ascontiguousarray(array).view(np.uint8).data for array in arrays]
    return _digest(orjson.dumps(small, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_SORT_KEYS), *parts)


def _digest(*parts: bytes | memoryview) -> str:
    digest = hashlib.sha256(usedforsecurity=False)
    for part in parts:
        digest.update(part)
    return f"scored-{digest.hexdigest()[:DIGITS]}"
