"""What a shard tells those who wait for news (see pool/api/transport.py).

- Topics are compared after each commit, and once a second while somebody waits, because leases and deadlines end by
  themselves.
- An asker has one question at a time.
"""

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import Any

from stepwell.errors import PoolUnavailable
from stepwell.pool.api.leasing import ReadyCounts
from stepwell.pool.api.transport import (
    CHANGES,
    PLAN,
    SERVING,
    SYNC,
    UNSCORED,
    News,
    NewsItem,
    Revision,
    Seen,
    ready_topic,
)
from stepwell.pool.shard.gateway_roster import EngineReports
from stepwell.pool.shard.shard import ShardTransactions


class NewsBoard:
    """The topics of one shard, and the questions that wait for them."""

    def __init__(self, epoch: str) -> None:
        self._epoch = epoch
        self._number = 0
        self._items: dict[str, NewsItem] = {}
        self._questions: dict[str, asyncio.Event] = {}
        """By asker."""
        self._by_topic: dict[str, set[asyncio.Event]] = {}

    @property
    def is_asked(self) -> bool:
        return bool(self._questions)

    def waits(self, topic: str) -> bool:
        """A question for the topic waits."""
        return topic in self._by_topic

    def item(self, topic: str) -> NewsItem:
        return self._items.get(topic) or NewsItem(Revision(self._epoch))

    def post(self, topic: str, value: Any = None) -> None:
        """There is something new."""
        self._number += 1
        self._items[topic] = NewsItem(Revision(self._epoch, self._number), value)
        for question in self._by_topic.get(topic, ()):
            question.set()

    def remove(self, topic: str) -> None:
        """Nobody asks for it any more."""
        self._items.pop(topic, None)

    def end_questions(self) -> None:
        for question in self._questions.values():
            question.set()

    async def wait(self, asker: str, seen: Seen, timeout: float) -> News:
        if (earlier := self._questions.get(asker)) is not None:
            earlier.set()
        self._questions[asker] = question = asyncio.Event()
        for topic in seen:
            self._by_topic.setdefault(topic, set()).add(question)
        try:
            if not (news := self._since(seen)):
                with suppress(TimeoutError):
                    async with asyncio.timeout(timeout):
                        await question.wait()
                news = self._since(seen)
            return news
        finally:
            if self._questions.get(asker) is question:
                del self._questions[asker]
            for topic in seen:
                self._by_topic[topic].discard(question)
                if not self._by_topic[topic]:
                    del self._by_topic[topic]

    def _since(self, seen: Seen) -> News:
        items = {topic: self.item(topic) for topic in seen}
        return {topic: item for topic, item in items.items() if item.revision != seen[topic]}


class ShardNews(NewsBoard):
    """Posts what has changed in the shard."""

    def __init__(self, epoch: str, transactions: ShardTransactions, engine_reports: EngineReports) -> None:
        super().__init__(epoch)
        self._transactions = transactions
        self._engine_reports = engine_reports
        self._marks: dict[str, object] = {}
        """By topic: what was posted last."""
        self._ticking: asyncio.Task[None] | None = None
        transactions.after_commit.append(self.look)

    async def wait(self, asker: str, seen: Seen, timeout: float) -> News:
        self._transactions.begin()
        self.look()
        if self._ticking is None or self._ticking.done():
            self._ticking = asyncio.create_task(self._tick())
        news = await super().wait(asker, seen, timeout)
        self._transactions.check_open()
        return news

    def look(self) -> bool:
        """Post what is new. Returns whether there was something."""
        state, number = self._transactions.pool.state, self._number
        if self._is_new(SERVING, state.serving):
            self.post(SERVING, replace(state.serving, epoch=self._epoch))
        if self._is_new(PLAN, self._transactions.plan):
            self.post(PLAN, self._transactions.plan)
        if self._is_new(SYNC, is_expected := self._engine_reports.is_sync_expected):
            self.post(SYNC, is_expected)
        if self._is_new(UNSCORED, state.offered_for_scoring):
            self.post(UNSCORED)
        if self._is_new(CHANGES, state.change_log.last_position):
            self.post(CHANGES)
        for name, channel in state.channels.items():
            if self._is_new(topic := ready_topic(name), counts := channel.ready_counts(), ReadyCounts()):
                self.post(topic, counts)
        return self._number > number

    def _is_new(self, topic: str, mark: object, first: object = None) -> bool:
        before = self._marks.get(topic, first)
        self._marks[topic] = mark
        return mark is not before and mark != before

    async def _tick(self) -> None:
        """As long as somebody waits."""
        try:
            while self.is_asked:
                await asyncio.sleep(self._transactions.recheck_interval)
                self._transactions.begin()
                if self.look():
                    await self._transactions.commit()
        except PoolUnavailable:  # the shard answers nothing any more
            self.end_questions()
