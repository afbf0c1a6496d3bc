"""Groups between a pool and a file, and the hashes by which a batch that is read from a file is known to be that
which was trained.

- A group is whole: its trajectories one after the other, the steps of each in order.
- Pages of groups are bounded by bytes, so that memory does not grow with what is exported.
- A hash covers what a trainer learns from: token ids, log-probabilities, masks, rewards and returns, bit for bit. It is
  the same for a step in a pool, in a batch and in an archive.
"""

from bisect import bisect_right
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from stepwell.steps.columns import Columns, cut, stack, unpack
from stepwell.steps.layout import run_lengths
from stepwell.steps.step import OF_TRAJECTORY, Step

STEP_BYTES = 1_000
"""The bytes that a step takes beside its arrays, roughly."""
DIGEST_SIZE = 16


@dataclass(frozen=True, slots=True, eq=False)
class StepGroup:
    columns: Columns
    source: str = ""
    channel: str = ""
    """Empty where it is not known: the archive of a pool does not have it."""

    @property
    def nbytes(self) -> int:
        columns = self.columns
        tokens = columns.added.itemsize * int(columns.lengths_S.sum())
        return tokens + columns.logprobs.nbytes + columns.mask.nbytes + STEP_BYTES * len(columns)

    def trajectories(self) -> list[Columns]:
        return cut(self.columns, run_lengths(self.columns.trajectory_uids))

    def count(self) -> int:
        """The number of trajectories in the group."""
        return len(set(self.columns.trajectory_uids))

    def only(self, trajectories: Sequence[Columns]) -> "StepGroup":
        return replace(self, columns=stack(trajectories))


def with_sorted_metadata(columns: Columns) -> Columns:
    """The same steps with the keys of metadata sorted: a pool does not keep their order."""
    return replace(columns, metadata=[dict(sorted(metadata.items())) for metadata in columns.metadata])


async def split_by_size(groups: AsyncIterable[StepGroup], nbytes: int) -> AsyncIterator[list[StepGroup]]:
    """Pages of about so many bytes, at least one group each."""
    page: list[StepGroup] = []
    held = 0
    async for group in groups:
        page.append(group)
        held += group.nbytes
        if held >= nbytes:
            yield page
            page, held = [], 0
    if page:
        yield page


def trajectory_digests(columns: Columns) -> dict[str, str]:
    """The digest of each trajectory's steps in these columns, in order, by trajectory_uid."""
    hashes: dict[str, blake2b] = {}
    for step in unpack(columns, copy=False):
        hashes.setdefault(step.trajectory_uid, blake2b(digest_size=DIGEST_SIZE)).update(_content(step))
    return {uid: found.hexdigest() for uid, found in hashes.items()}


def batch_digest(trajectories: Iterable[str]) -> str:
    """The digest of the hashes of a batch's trajectories, in any order: the parts of a batch come from several
    shards."""
    return blake2b("".join(sorted(trajectories)).encode(), digest_size=DIGEST_SIZE).hexdigest()


def lineage_name(trajectory_uid: str) -> str:
    """The name of a trajectory in a lineage: it says nothing, but whoever has the uid finds it."""
    return blake2b(trajectory_uid.encode(errors="surrogatepass"), digest_size=DIGEST_SIZE).hexdigest()


def first_version(versions: Sequence[int], handed_out_under: int) -> int:
    """The version of the policy that a batch is in first, of those that were served, in order; the next number if there
    is none yet."""
    place = bisect_right(versions, handed_out_under)
    return versions[place] if place < len(versions) else handed_out_under + 1


def _content(step: Step) -> bytes:
    own_reward = None if step.reward_of == OF_TRAJECTORY else step.reward
    numbers = (own_reward, step.trajectory_return, step.outcome_reward, step.policy_version, step.step_index)
    logprobs, mask = step.response_logprobs, step.response_mask
    parts = (
        step.uid.encode(errors="surrogatepass"),
        repr(numbers).encode(),
        step.prompt_ids.tobytes(),
        step.response_ids.tobytes(),
        b"" if logprobs is None else logprobs.tobytes(),
        b"" if mask is None or mask.all() else mask.tobytes(),
    )
    return b"".join(b"%d:%b" % (len(part), part) for part in parts)
