"""Which shard has the groups of a prompt, and how a client and a shard find out that they do not agree on it.

Rendezvous hashing: the shard with the highest score for a prompt has its groups. A further shard takes its share from
all others, and nothing moves between these. Hashes are the same in every process, unlike Python's own.
"""

from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from zlib import crc32

from stepwell.common.message_format import message, sent
from stepwell.errors import PoolUnavailable

FIRST_REVISION = 1
"""Of a pool whose number of shards has not changed."""


@message
@dataclass(frozen=True, slots=True)
class Layout:
    revision: int
    shards: int

    def owner(self, prompt_uid: str) -> int:
        """The index of the shard. The first layout of a pool is that of the releases before rendezvous hashing."""
        if self.revision <= FIRST_REVISION:
            return crc32(prompt_uid.encode()) % self.shards
        return _highest_score(prompt_uid, self.shards)


@sent
class GroupElsewhere(PoolUnavailable):
    """The shard does not have the group, and may not open it."""


@sent
class LayoutDiffers(PoolUnavailable):
    """The call was routed by another revision of the plan than the shard's."""


@lru_cache(maxsize=16_384)
def _highest_score(prompt_uid: str, shards: int) -> int:
    prompt = prompt_uid.encode()
    return max(range(shards), key=lambda shard: blake2b(prompt, digest_size=8, key=shard.to_bytes(4)).digest())
