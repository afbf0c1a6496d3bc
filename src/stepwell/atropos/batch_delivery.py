"""Batches for trainers: filled, sent, and settled with the pool.

Invariants:
- A batch is under lease while it is sent. It is acknowledged when the client has everything but the last bytes, and
  returned when the client leaves or the lease has expired. So a complete response was counted, and the groups of an
  incomplete one are served again.
- A trainer that asks for a lease of its own acknowledges it by itself.
"""

import binascii
import logging
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated

import orjson
from pydantic import Field

from stepwell.atropos.http import JSON, StreamedResponse
from stepwell.atropos.registry import AtroposMetrics, Registry
from stepwell.errors import BadRequest, LeaseExpired, StepwellError
from stepwell.pool.api.leasing import HasLeases, LeasedGroups
from stepwell.pool.client import PoolClient
from stepwell.steps.step import Exactness
from stepwell.wire.scored_groups import AtroposBody, batch_parts
from stepwell.wire.scored_groups_arrow import MEDIA_TYPE, arrow_parts
from stepwell.wire.scored_groups_steps import groups_from_columns

log = logging.getLogger("stepwell.atropos")

DELIVERY_LEASE = 300.0
"""Seconds that sending a batch may take."""
LONGEST_LEASE = 7 * 24 * 3600.0
LEASE_HEADER = "x-stepwell-lease"
COUNTED_KEPT = 1000
"""Acknowledged leases that are remembered, so that each counts once."""


@dataclass(frozen=True, slots=True)
class NamedLease:
    """A lease as a trainer names it. The name has everything that the pool needs, so any server can settle it."""

    leases: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        return urlsafe_b64encode(orjson.dumps(self.leases)).decode()


def read_lease(name: str) -> NamedLease:
    try:
        parts = orjson.loads(urlsafe_b64decode(name))
        return NamedLease(tuple((str(shard), str(lease)) for shard, lease in parts))
    except (binascii.Error, ValueError, TypeError):
        raise BadRequest(f"{name!r} is not a lease; the header {LEASE_HEADER} of a batch names one") from None


class DeliveryRequest(AtroposBody):
    """The query of a GET /batch."""

    lease: Annotated[float, Field(gt=0, le=LONGEST_LEASE, allow_inf_nan=False)] | None = None
    """Seconds that the trainer has to acknowledge the batch; None: its arrival acknowledges it."""
    min_exactness: Exactness = Exactness.RETOKENIZED


class BatchDelivery:
    def __init__(self, pool: PoolClient, metrics: AtroposMetrics, save: Callable[[], Awaitable[None]]) -> None:
        self._pool = pool
        self._metrics = metrics
        self._save = save
        self._counted: OrderedDict[tuple[tuple[str, str], ...], None] = OrderedDict()
        """The last leases that were acknowledged and counted."""

    async def batch(
        self, channel: str, registry: Registry, request: DeliveryRequest, *, as_arrow: bool, now: float
    ) -> StreamedResponse | None:
        """None if no set of ready groups fills a batch."""
        assert registry.trainer is not None
        filled = await self._pool.fill_batch(
            registry.trainer.batch_size,
            channel=channel,
            shares=registry.shares(now),
            lease=request.lease or DELIVERY_LEASE,
            min_exactness=request.min_exactness,
            untrainable=False,
            heartbeats=request.lease is None,
        )
        if filled is None:
            return None
        groups = groups_from_columns(filled.columns, filled.group_sizes, filled.left_out)
        return StreamedResponse(
            arrow_parts(groups) if as_arrow else batch_parts(groups),
            settle=self._return_if_lost(filled) if request.lease else self._settle_on_arrival(filled, registry),
            media_type=MEDIA_TYPE if as_arrow else JSON,
            headers={LEASE_HEADER: NamedLease(filled.leases).name} if request.lease else None,
        )

    async def ack(self, registry: Registry, leased: HasLeases) -> None:
        """The trainer keeps the batch. A repeated call counts once."""
        await self._pool.ack(leased)
        if leased.leases in self._counted:
            return
        self._counted[leased.leases] = None
        if len(self._counted) > COUNTED_KEPT:
            self._counted.popitem(last=False)
        registry.step += 1
        self._metrics.count_batch("delivered")
        await self._save()

    async def nack(self, leased: HasLeases) -> None:
        await self._pool.nack(leased)
        self._metrics.count_batch("returned")

    def _settle_on_arrival(self, filled: LeasedGroups, registry: Registry) -> Callable[[bool], Awaitable[bool]]:
        async def settle(arrived: bool) -> bool:
            try:
                await (self.ack(registry, filled) if arrived else self.nack(filled))
            except LeaseExpired:
                log.warning("sending a batch took more than %g s; its groups will be served again", DELIVERY_LEASE)
                return False
            except StepwellError as failure:
                log.warning("a batch could not be settled: %s", failure)
                return False
            return arrived

        return settle

    def _return_if_lost(self, filled: LeasedGroups) -> Callable[[bool], Awaitable[bool]]:
        async def settle(arrived: bool) -> bool:
            if not arrived:
                await self.nack(filled)
            return arrived

        return settle
