"""One question waits at a shard for all news that is waited for here: in a process, and in the link of a machine.

- The question asks for the topics of all, each with the oldest revision that one of them has seen. What it brings is
  dealt to those for whom it is news.
- Who waits for something that the running question does not ask for replaces it: the shard ends the earlier one.
- A question that has ended without news is asked again. One that nobody waits for any more is not.
"""

import asyncio
import random
from contextlib import suppress
from uuid import uuid4

from stepwell.pool.api.transport import UNSEEN, News, Revision, Seen, WaitNews

NEWS_WAIT = 50.0
"""Seconds that a question waits for news, give or take a fifth, so that those of many processes do not come at once."""


class SharedQuestion:
    """The question at one shard. It is itself asked as a shard is."""

    def __init__(self, ask: WaitNews, *, wait: float = NEWS_WAIT) -> None:
        self._ask = ask
        self._wait = wait
        self._name = uuid4().hex
        self._waiting: dict[str, tuple[asyncio.Future[News], Seen]] = {}
        """By asker."""
        self._asked: dict[str, Revision] = {}
        """What the running question asks for."""
        self._asking: asyncio.Task[None] | None = None
        self._earlier: set[asyncio.Task[None]] = set()
        """Questions that were replaced, until the shard has ended them."""

    async def wait(self, asker: str, seen: Seen, timeout: float) -> News:
        """Raises what the question raises."""
        answer: asyncio.Future[News] = asyncio.get_running_loop().create_future()
        if (earlier := self._waiting.pop(asker, None)) is not None:
            _settle(earlier[0], {})
        self._waiting[asker] = (answer, seen)
        if not all(topic in self._asked and self._asked[topic].covers(seen[topic]) for topic in seen):
            self._ask_for({})
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    return await answer
            return {}
        finally:
            if asker in self._waiting and self._waiting[asker][0] is answer:
                del self._waiting[asker]

    def _ask_for(self, dealt: Seen) -> None:
        """What all wait for, and more of what was just dealt: who has got it is about to come back."""
        asked = dict(dealt)
        for _, seen in self._waiting.values():
            for topic, revision in seen.items():
                asked[topic] = _oldest(asked.get(topic, revision), revision)
        if self._asking is not None:
            self._earlier.add(self._asking)
            self._asking.add_done_callback(self._earlier.discard)
        self._asked = asked
        self._asking = asyncio.create_task(self._question(asked))

    async def _question(self, asked: Seen) -> None:
        try:
            news = await self._ask(self._name, asked, self._wait * random.uniform(0.8, 1.2))
        except Exception as failure:  # noqa: BLE001 - all who wait get it
            if self._asking is asyncio.current_task():
                self._asking, self._asked = None, {}
                for answer, _ in self._waiting.values():
                    _settle(answer, failure)
                self._waiting.clear()
            return
        dealt = self._deal(news)
        if self._asking is asyncio.current_task():
            self._asking, self._asked = None, {}
            if self._waiting:
                self._ask_for(dealt)

    def _deal(self, news: News) -> Seen:
        """Returns what somebody has got."""
        dealt: dict[str, Revision] = {}
        for asker, (answer, seen) in list(self._waiting.items()):
            own = {topic: item for topic, item in news.items() if seen.get(topic, item.revision) != item.revision}
            if own:
                _settle(answer, own)
                del self._waiting[asker]
                dealt |= {topic: item.revision for topic, item in own.items()}
        return dealt


def _oldest(one: Revision, other: Revision) -> Revision:
    if one.epoch != other.epoch:
        return UNSEEN
    return min(one, other)


def _settle(answer: "asyncio.Future[News]", outcome: News | Exception) -> None:
    if answer.done():
        return
    if isinstance(outcome, Exception):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)
