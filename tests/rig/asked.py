"""Ask a shard of this process, without a client."""

from typing import TypeVar, cast

from stepwell.pool.shard.operation import Operation
from stepwell.pool.shard.service import ShardService

R = TypeVar("R")


async def asked(shard: ShardService, operation: Operation[R], revision: int | None = None) -> R:
    """The answer, or the exception by which the operation is refused."""
    (answer,) = await shard.run([operation], revision)
    if isinstance(answer, Exception):
        raise answer
    return cast("R", answer)
