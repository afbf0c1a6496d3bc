"""Ask a shard of this process, without a client."""

from collections.abc import Sequence
from typing import Any, TypeVar, cast
from uuid import uuid4

from stepwell.pool.api.leasing import BatchRequest, LeasedGroups, Settlement
from stepwell.pool.shard.operation import Operation
from stepwell.pool.shard.service import ShardService

R = TypeVar("R")
ONE = BatchRequest(count=1, channel="train")


async def asked(shard: ShardService, operation: Operation[R], revision: int | None = None) -> R:
    """The answer, or the exception by which the operation is refused."""
    (answer,) = await shard.run([operation], revision)
    if isinstance(answer, Exception):
        raise answer
    return cast("R", answer)


def called(method: str, args: Sequence[Any]) -> str:
    """The name of a call to a shard: that of its operation, if it is one."""
    return type(args[0][0]).__name__ if method == "run" else method


async def trained(shard: ShardService, request: BatchRequest = ONE) -> LeasedGroups:
    """The requested groups, which must be ready. They are acknowledged."""
    leased = await shard.take(request, 60.0, uid := uuid4().hex)
    assert leased is not None, await shard.waiting_for(request)
    assert await shard.ack(uid) is Settlement.DONE
    return leased
