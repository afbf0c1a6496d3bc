"""Reading conversations for the search, behind everyone's back: the newest first, a few at a time.

What always holds: the pool spends no more than SHARE of its time on it, and this process no more than a quarter.
"""

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from stepwell.common.tokenizers import TokenDecoder
from stepwell.dashboard.index.budget import Budget
from stepwell.dashboard.index.texts import Texts
from stepwell.dashboard.index.trajectories import Key, key_of
from stepwell.errors import StepwellError
from stepwell.pool.api.ports import PoolReader
from stepwell.pool.api.watching import TrajectorySnapshot
from stepwell.steps.columns import Columns, unpack
from stepwell.steps.conversation import shared_length
from stepwell.steps.step import Step

INTERVAL = 1.0
SHARE = 0.012
"""Of the pool's time, its answers' way here included; the work itself is about half of it."""
RESERVE = 0.05
AT_ONCE = 200
TOKENS_AT_ONCE = 500_000
DECODING_REST = 3.0
"""Rest for so many times as long as decoding took."""


class Indexing:
    def __init__(self, pool: PoolReader, texts: Texts, decoder: TokenDecoder) -> None:
        self._pool = pool
        self._texts = texts
        self._decoder = decoder
        self._budget = Budget(SHARE, RESERVE)

    async def look(self) -> float:
        wanted = [] if self._decoder.why_not() else self._texts.next(AT_ONCE, TOKENS_AT_ONCE)
        if not wanted:
            return INTERVAL
        begun = time.monotonic()
        try:
            columns = await self._pool.read([key_of(row) for row in wanted])
        except StepwellError:
            for row in wanted:
                self._texts.tell(row)
            return INTERVAL
        read = time.monotonic()
        self._budget.spend(read - begun, len(wanted), read)
        texts = await asyncio.to_thread(self._decode, columns)
        self._keep(wanted, texts)
        now = time.monotonic()
        return max(self._budget.rest(now), DECODING_REST * (now - read))

    def _decode(self, columns: Columns) -> dict[Key, str]:
        return {key: conversation_text(steps, self._decoder) for key, steps in by_trajectory(columns)}

    def _keep(self, wanted: Iterable[TrajectorySnapshot], texts: dict[Key, str]) -> None:
        for row in wanted:
            text = texts.get(key_of(row))
            if text is not None:
                self._texts.put(row, text)


def by_trajectory(columns: Columns) -> Iterator[tuple[Key, list[Step]]]:
    for key, steps in groupby(unpack(columns, copy=False), lambda step: (step.trajectory_uid, step.prompt_uid)):
        yield key, list(steps)


def conversation_text(steps: Sequence[Step], decoder: TokenDecoder) -> str:
    """Each part once: of a prompt, only what was not in the step before."""
    before: Step | None = None
    parts: list[str] = []
    for step in steps:
        new = step.prompt_ids[shared_length(before, step.prompt_ids) :]
        parts.append(decoder.text([*new.tolist(), *step.response_ids.tolist()]))
        before = step
    return "".join(parts)
