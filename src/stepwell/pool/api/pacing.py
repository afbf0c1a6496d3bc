"""How much producers may start, so that nothing can become too stale before it is trained."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Refill:
    """A group whose deadline passed, and how many more rollouts it needs."""

    prompt_uid: str
    missing: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pacing:
    batch: int
    """Trajectories a training step takes: as set, or as last seen; 0 while no one knows."""
    batches_ahead: int
    """How many training steps' worth may be under way: one, and one more for each version of allowed staleness."""
    in_flight: int
    """Trajectories that are not complete."""
    queued: int
    """Trajectories that are complete and wait for the trainer."""
    refills: tuple[Refill, ...] = ()

    @property
    def may_start(self) -> int | None:
        """New trajectories that may start now; None while no one knows how much a training step takes."""
        if self.batch == 0:
            return None
        return max(0, self.batch * self.batches_ahead - self.in_flight - self.queued)


def merge_pacing(parts: Sequence[Pacing], batch_size: int | None) -> Pacing:
    """The pacing of a pool from that of its shards; a batch that was set is set for all of them together."""
    return Pacing(
        batch=batch_size or sum(part.batch for part in parts),
        batches_ahead=parts[0].batches_ahead,
        in_flight=sum(part.in_flight for part in parts),
        queued=sum(part.queued for part in parts),
        refills=tuple(refill for part in parts for refill in part.refills),
    )
