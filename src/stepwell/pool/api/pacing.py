"""How many rollouts producers may start, so that none becomes too stale before it is trained."""

from collections.abc import Sequence
from dataclasses import dataclass

from stepwell.common.message_format import message


@message
@dataclass(frozen=True, slots=True)
class Refill:
    """A group whose deadline has passed, and how many more rollouts it needs."""

    prompt_uid: str
    missing: int


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Pacing:
    batch: int
    """Trajectories per training step: as configured, or as in the last fetch; 0 while unknown."""
    batches_ahead: int | None
    """How many batches may be in progress: one, and one more per version of allowed staleness; None if data may be of
    any age."""
    in_flight: int
    """Trajectories that are not complete."""
    queued: int
    """Complete trajectories that wait for the trainer."""
    refills: tuple[Refill, ...] = ()
    group_deadline: float | None = None
    missing: tuple[str, ...] = ()
    """Shards that did not answer. Their last known numbers are counted."""

    @property
    def may_start(self) -> int | None:
        """New trajectories that may start now; None if any number may: the batch size is not known yet, or data may be
        of any age."""
        if self.batch == 0 or self.batches_ahead is None:
            return None
        return max(0, self.batch * self.batches_ahead - self.in_flight - self.queued)

    @property
    def waits_for(self) -> str:
        """In words, why no trajectory may start; empty if one may."""
        if self.may_start != 0 or self.batches_ahead is None:
            return ""
        return (
            f"{self.queued} complete rollouts wait for the trainer and {self.in_flight} run; together they may be "
            f"{self.batch * self.batches_ahead}: {self.batch} a batch, with max_staleness {self.batches_ahead - 1}"
        )


def merge_pacing(parts: Sequence[Pacing], batch_size: int | None, missing: tuple[str, ...] = ()) -> Pacing:
    """The pool's pacing from its shards'. A configured batch size is that of the whole pool."""
    return Pacing(
        batch=batch_size or sum(part.batch for part in parts),
        batches_ahead=parts[0].batches_ahead,
        in_flight=sum(part.in_flight for part in parts),
        queued=sum(part.queued for part in parts),
        refills=tuple(refill for part in parts for refill in part.refills),
        group_deadline=parts[0].group_deadline,
        missing=missing,
    )
