"""The state that all requests to the dashboard share: the pool, the answers that it gave, and the index that follows
it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from stepwell.common.async_calls import SharedAnswer, repeating
from stepwell.common.tokenizers import TokenDecoder, Tokenizer
from stepwell.dashboard.follower import ConversationTexts, PoolFollower, TextIndexer
from stepwell.dashboard.gateway_monitor import GatewayMonitor
from stepwell.dashboard.index import TrajectoryIndex
from stepwell.dashboard.views import NextBatches
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.stats import TimeSeries
from stepwell.pool.client import PoolClient

MAX_SERIES_SECONDS = 24 * 3600.0
SERIES_SPANS = (60.0, 300.0, 900.0, 3600.0, 6 * 3600.0, MAX_SERIES_SECONDS)


class DashboardState:
    def __init__(self, pool: PoolClient, plan: PoolPlan, gateways: GatewayMonitor, tokenizer: Tokenizer | None) -> None:
        self.pool = pool
        self.plan = plan
        self.gateways = gateways
        self.decoder = TokenDecoder(tokenizer)
        self.index = TrajectoryIndex()
        self.texts = ConversationTexts()
        self.follower = PoolFollower(pool, self.index, self.texts)
        self.stats = SharedAnswer(pool.stats)
        self.policy = SharedAnswer(pool.policy_status)
        self.next_batches = NextBatches(pool, self.decoder)
        self._series = {span: SharedAnswer(partial(pool.series, seconds=span)) for span in SERIES_SPANS}

    async def series(self, seconds: float) -> TimeSeries:
        """Callers share the answer for the shortest span that is long enough."""
        return await self._series[min(span for span in SERIES_SPANS if span >= seconds)].get()

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Inside the block, the index and the readings of the gateways are kept up to date."""
        self.decoder.start()
        indexer = TextIndexer(self.pool, self.texts, self.decoder)
        try:
            async with self.gateways.watching(), repeating(self.follower.poll, indexer.poll):
                yield
        finally:
            await self.stats.close()
            await self.policy.close()
            await self.next_batches.close()
            for shared in self._series.values():
                await shared.close()
