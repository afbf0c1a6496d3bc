"""Batches for trainers: filled, sent, and settled with the pool.

What always holds: a batch is under lease while it is on its way. It is acknowledged when the client has all of it but
the last bytes, and given back when the client leaves or the pool no longer agrees; so an answer that is whole was
counted, and one that broke off is served again. A trainer that names a lease of its own acknowledges by itself.
"""

import binascii
import logging
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import orjson

from stepwell.atropos.http import LongAnswer, Request
from stepwell.atropos.metrics import Sight
from stepwell.atropos.registry import Registry
from stepwell.errors import BadRequest, LeaseExpired, StepwellError
from stepwell.pool.api.leasing import HasLeases, LeasedGroups
from stepwell.pool.api.ports import GroupExchange
from stepwell.steps.step import Exactness
from stepwell.wire.scored_groups_arrow import MEDIA_TYPE, arrow_parts
from stepwell.wire.scored_groups_json import batch_parts
from stepwell.wire.scored_groups_steps import groups_from_columns

log = logging.getLogger("stepwell.door")

DELIVERY = 300.0
"""Seconds a batch may take on its way."""
LONGEST_LEASE = 7 * 24 * 3600.0
LEASE_HEADER = "x-stepwell-lease"
COUNTED_KEPT = 1000


@dataclass(frozen=True, slots=True)
class NamedLease:
    """A lease as a trainer names it: all that the pool needs is in the name, so any door settles it."""

    leases: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        return urlsafe_b64encode(orjson.dumps(self.leases)).decode()


def read_lease(name: str) -> NamedLease:
    try:
        parts = orjson.loads(urlsafe_b64decode(name))
        return NamedLease(tuple((str(shard), str(lease)) for shard, lease in parts))
    except (binascii.Error, ValueError, TypeError):
        raise BadRequest(f"{name!r} is no lease; the header {LEASE_HEADER} of a batch names one") from None


@dataclass(frozen=True, slots=True)
class BatchRequest:
    lease: float | None
    """Seconds for which the trainer has it and then acknowledges; None: the answer's arrival is enough."""
    min_exactness: Exactness
    as_arrow: bool


def read_batch_request(request: Request) -> BatchRequest:
    grade = request.query.get("min_exactness", Exactness.RETOKENIZED.value)
    if grade not in list(Exactness):
        raise BadRequest(f"min_exactness: {grade!r} is none of {', '.join(Exactness)}")
    return BatchRequest(_seconds(request.query.get("lease")), Exactness(grade), request.wants(MEDIA_TYPE))


def _seconds(text: str | None) -> float | None:
    try:
        seconds = None if text is None else float(text)
    except ValueError:
        seconds = -1.0
    if seconds is None or 0 < seconds <= LONGEST_LEASE:
        return seconds
    raise BadRequest(f"lease: {text!r} is no number of seconds up to a week")


class Serving:
    def __init__(self, pool: GroupExchange, sight: Sight, save: Callable[[], Awaitable[None]]) -> None:
        self._pool = pool
        self._sight = sight
        self._save = save
        self._counted: OrderedDict[tuple[tuple[str, str], ...], None] = OrderedDict()
        """Leases that were acknowledged and counted, the last ones."""

    async def batch(self, channel: str, registry: Registry, asked: BatchRequest, now: float) -> LongAnswer | None:
        """None while there is no set of groups that fills a batch."""
        assert registry.trainer is not None
        filled = await self._pool.fill_batch(
            registry.trainer.batch_size,
            channel=channel,
            shares=registry.shares(now),
            lease=asked.lease or DELIVERY,
            min_exactness=asked.min_exactness,
            untrainable=False,
        )
        if filled is None:
            return None
        groups = groups_from_columns(filled.columns, filled.group_sizes)
        return LongAnswer(
            arrow_parts(groups) if asked.as_arrow else batch_parts(groups),
            settle=self._left_to_the_trainer(filled) if asked.lease else self._on_arrival(filled, registry),
            content_type=MEDIA_TYPE if asked.as_arrow else "application/json",
            headers={LEASE_HEADER: NamedLease(filled.leases).name} if asked.lease else {},
        )

    async def ack(self, registry: Registry, leased: HasLeases) -> None:
        """It is the trainer's for good. Saying so again is harmless, and counts once."""
        await self._pool.ack(leased)
        if leased.leases in self._counted:
            return
        self._counted[leased.leases] = None
        if len(self._counted) > COUNTED_KEPT:
            self._counted.popitem(last=False)
        registry.step += 1
        self._sight.batch("delivered")
        await self._save()

    async def nack(self, leased: HasLeases) -> None:
        await self._pool.nack(leased)
        self._sight.batch("returned")

    def _on_arrival(self, filled: LeasedGroups, registry: Registry) -> Callable[[bool], Awaitable[bool]]:
        async def settle(arrived: bool) -> bool:
            try:
                await (self.ack(registry, filled) if arrived else self.nack(filled))
            except LeaseExpired:
                log.warning("a batch took more than %g s on its way; it will be served again", DELIVERY)
                return False
            except StepwellError as failure:
                log.warning("a batch could not be settled: %s", failure)
                return False
            return arrived

        return settle

    def _left_to_the_trainer(self, filled: LeasedGroups) -> Callable[[bool], Awaitable[bool]]:
        async def settle(arrived: bool) -> bool:
            if not arrived:
                await self.nack(filled)
            return arrived

        return settle
