"""The next batch in the form that the page shows: a row for each group, with the beginning of its prompt."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from stepwell.common.async_calls import SharedAnswer
from stepwell.common.tokenizers import TokenDecoder
from stepwell.dashboard.follower import by_trajectory
from stepwell.dashboard.index import TrajectoryKey
from stepwell.errors import BadRequest
from stepwell.pool.api.leasing import BatchPreview, BatchRequest, ExactFill, PreviewItem
from stepwell.pool.client import PoolClient
from stepwell.steps.conversation import read_turns
from stepwell.steps.step import Step

PROMPT_TOKENS, PROMPT_CHARACTERS = 2_000, 160
PROMPTS_READ = 40
"""Prompts that one request reads from the pool. The others come with the next requests."""
PROMPTS_KEPT = 2_000

Row: TypeAlias = dict[str, object]


@dataclass(slots=True)
class GroupItems:
    """The part of a batch that belongs to one group: trajectories and steps that are taken singly are shown
    together."""

    items: list[PreviewItem]

    @property
    def key(self) -> TrajectoryKey:
        """The key of the first trajectory."""
        return self.items[0].trajectories[0], self.items[0].prompt_uid

    def row(self, prompts: Mapping[TrajectoryKey, str]) -> Row:
        first = self.items[0]
        rewards = {uid: r for item in self.items for uid, r in zip(item.trajectories, item.rewards, strict=True)}
        versions = [item.oldest_version for item in self.items if item.oldest_version is not None]
        return {
            **{name: getattr(first, name) for name in ("prompt_uid", "group", "shard", "source", "size", "opened_at")},
            "prompt": prompts.get(self.key, ""),
            "rollouts": len(rewards),
            "rewards": list(rewards.values()),
            "steps": sum(item.steps for item in self.items),
            "oldest_version": min(versions, default=None),
            "behind": max(item.behind for item in self.items),
            "from_history": first.from_history,
            "why": first.why,
        }


class NextBatches:
    """The next batches by channel. Any number of viewers cost the pool as much as one."""

    def __init__(self, pool: PoolClient, decoder: TokenDecoder) -> None:
        self._pool = pool
        self._decoder = decoder
        self._previews: dict[str, SharedAnswer[BatchPreview]] = {}
        self._prompts: dict[TrajectoryKey, str] = {}
        """The beginnings of prompts that were read, the oldest first."""

    async def of(self, channel: str, known: Sequence[str]) -> dict[str, object]:
        """BadRequest if it is not one of the known channels."""
        if channel not in known:
            raise BadRequest(f"there is no channel {channel!r}; the pool has {', '.join(known) or 'none yet'}")
        if channel not in self._previews:
            self._previews[channel] = SharedAnswer(partial(self._pool.preview, channel))
        preview = await self._previews[channel].get()
        batch, waiting = by_group(preview.items), by_group(preview.waiting)
        await self._read_prompts([group.key for group in (*batch, *waiting)])
        return {
            "asked_at": preview.asked_at,
            "request": _request(preview.request),
            "is_complete": preview.is_complete,
            "waits_for": preview.waits_for,
            "missing": preview.missing,
            "batch": [group.row(self._prompts) for group in batch],
            "waiting": [group.row(self._prompts) for group in waiting],
        }

    async def close(self) -> None:
        for preview in self._previews.values():
            await preview.close()

    async def _read_prompts(self, keys: Sequence[TrajectoryKey]) -> None:
        unread = [key for key in dict.fromkeys(keys) if key not in self._prompts][:PROMPTS_READ]
        if unread and not self._decoder.why_not():
            columns = await self._pool.read(unread)

            def decode() -> dict[TrajectoryKey, str]:
                return {key: prompt_beginning(steps[0], self._decoder) for key, steps in by_trajectory(columns)}

            self._prompts |= await asyncio.to_thread(decode)
            while len(self._prompts) > PROMPTS_KEPT:
                del self._prompts[next(iter(self._prompts))]


def by_group(items: Sequence[PreviewItem]) -> list[GroupItems]:
    """Groups the items in the order of their first ones. What has no trajectory is not shown."""
    groups: dict[tuple[str, int], GroupItems] = {}
    for item in items:
        if item.trajectories:
            groups.setdefault((item.shard, item.group), GroupItems([])).items.append(item)
    return list(groups.values())


def prompt_beginning(step: Step, decoder: TokenDecoder) -> str:
    """The beginning of the first thing that a user says; of the whole prompt, if nobody is a user."""
    turns = read_turns(decoder.texts(step.prompt_ids[:PROMPT_TOKENS].tolist()), [])
    said = next((turn.text for turn in turns if turn.role == "user"), turns[0].text if turns else "")
    return " ".join(said.split())[:PROMPT_CHARACTERS]


def _request(request: BatchRequest | ExactFill) -> Row:
    step_filter = request.step_filter
    terms: Row = {"min_exactness": step_filter.min_exactness, "untrainable": step_filter.untrainable}
    if isinstance(request, ExactFill):
        return {"kind": "exact", "count": request.trajectories, "unit": "trajectories", **terms}
    fetch = {"count": request.count, "unit": request.unit, "order": request.order, "history": request.history}
    return {"kind": "fetch", **fetch, **terms}
