"""Trajectories, groups and the next batches in the form that the page shows. Views of steps are pure, but slow: call
them in a thread."""

import asyncio
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from stepwell.common.async_calls import SharedAnswer
from stepwell.common.tokenizers import TokenDecoder
from stepwell.dashboard.follower import by_trajectory
from stepwell.dashboard.index import TrajectoryKey, key_of
from stepwell.errors import BadRequest
from stepwell.pool.api.leasing import BatchPreview, BatchRequest, ExactFill, PreviewItem
from stepwell.pool.api.watching import TrajectorySnapshot, TrajectoryState
from stepwell.pool.client import PoolClient
from stepwell.steps.advantages import group_advantages
from stepwell.steps.conversation import read_turns, shared_length
from stepwell.steps.step import SHOWN, Step

PROMPT_TOKENS = 4_000
LAST_CHARACTERS = 2_000
BEGINNING_TOKENS, BEGINNING_CHARACTERS = 2_000, 160
"""The most tokens that are read of a prompt's beginning, and the most characters shown of it, in the list of the next
batches."""
PROMPTS_READ = 40
"""Prompts that one request reads from the pool. The others come with the next requests."""
PROMPTS_KEPT = 2_000
Row: TypeAlias = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutView:
    """One rollout of a group."""

    summary: TrajectorySnapshot
    advantage: float | None
    last: str
    """The end of its last response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    prompt_uid: str
    group: int
    shard: str
    size: int
    mean: float | None
    std: float | None
    rows: Sequence[RolloutView]


def step_views(steps: Sequence[Step], decoder: TokenDecoder) -> list[dict[str, Any]]:
    """All columns that the schema marks as shown, the tokens, and the turns of what is new since the step before."""
    pairs = pairwise([None, *steps])
    return [_step_view(step, shared_length(before, step.prompt_ids), decoder) for before, step in pairs if step]


def group_view(rows: Sequence[TrajectorySnapshot], last: Mapping[TrajectoryKey, str]) -> GroupView:
    """A dropped rollout is not trained, so it has no advantage and no part in the mean."""
    rewards_T = np.array(
        [math.nan if row.reward is None or row.state is TrajectoryState.DROPPED else row.reward for row in rows]
    )
    advantages_T = group_advantages(rewards_T, np.zeros(len(rows), np.int64)).tolist()
    rewards = rewards_T[~np.isnan(rewards_T)].tolist()
    return GroupView(
        prompt_uid=rows[0].prompt_uid,
        group=rows[0].group,
        shard=rows[0].shard,
        size=rows[0].group_size,
        mean=statistics.fmean(rewards) if rewards else None,
        std=None if not rewards else statistics.stdev(rewards) if len(rewards) > 1 else 0.0,
        rows=[
            RolloutView(
                summary=row,
                advantage=None if math.isnan(advantage) else advantage,
                last=last.get(key_of(row), ""),
            )
            for row, advantage in zip(rows, advantages_T, strict=True)
        ],
    )


def last_text(steps: Sequence[Step], decoder: TokenDecoder) -> str:
    return decoder.text(steps[-1].response_ids.tolist())[-LAST_CHARACTERS:]


def _step_view(step: Step, new_from: int, decoder: TokenDecoder) -> dict[str, Any]:
    """The prompt shares the tokens before the index `new_from` with the previous step."""
    new = step.prompt_ids[new_from:]
    has_texts = not decoder.why_not()
    prompt_texts = decoder.texts(new.tolist()) if has_texts else []
    response_texts = decoder.texts(step.response_ids.tolist()) if has_texts else []
    return {
        **{name: getattr(step, name) for name in SHOWN},
        "prompt_length": len(step.prompt_ids),
        "new_from": new_from,
        "turns": read_turns(prompt_texts, response_texts) if has_texts else (),
        "tokens": _response_tokens(step, response_texts),
        "prompt_tokens": {
            "ids": new[-PROMPT_TOKENS:].tolist(),
            "texts": prompt_texts[-PROMPT_TOKENS:],
            "cut": max(0, len(new) - PROMPT_TOKENS),  # tokens that were left out before these
        },
    }


def _response_tokens(step: Step, texts: Sequence[str]) -> dict[str, Sequence[Any]]:
    """`texts` is empty without a tokenizer."""
    length = len(step.response_ids)
    logprobs = [None] * length if step.response_logprobs is None else step.response_logprobs.tolist()
    versions = [step.policy_version] * length
    for span in step.version_spans:
        versions[span.start : span.end] = [span.version] * (min(span.end, length) - span.start)
    return {
        "ids": step.response_ids.tolist(),
        "texts": texts,
        "logprobs": [value if value is not None and math.isfinite(value) else None for value in logprobs],
        "trained": [True] * length if step.response_mask is None else step.response_mask.tolist(),
        "versions": versions,
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
        batch, waiting = _by_group(preview.items), _by_group(preview.waiting)
        await self._read_prompts([_first_key(items) for items in (*batch, *waiting)])
        return {
            "asked_at": preview.asked_at,
            "request": _request(preview.request),
            "is_complete": preview.is_complete,
            "waits_for": preview.waits_for,
            "missing": preview.missing,
            "batch": [_row(items, self._prompts) for items in batch],
            "waiting": [_row(items, self._prompts) for items in waiting],
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


def _by_group(items: Sequence[PreviewItem]) -> list[list[PreviewItem]]:
    """The items in the order of their first ones: trajectories and steps of a group that are taken singly are shown
    together. What has no trajectory is not shown."""
    groups: dict[tuple[str, int], list[PreviewItem]] = {}
    for item in items:
        if item.trajectories:
            groups.setdefault((item.shard, item.group), []).append(item)
    return list(groups.values())


def _first_key(items: Sequence[PreviewItem]) -> TrajectoryKey:
    return items[0].trajectories[0], items[0].prompt_uid


def _row(items: Sequence[PreviewItem], prompts: Mapping[TrajectoryKey, str]) -> Row:
    first = items[0]
    rewards = {uid: r for item in items for uid, r in zip(item.trajectories, item.rewards, strict=True)}
    return {
        **{name: getattr(first, name) for name in ("prompt_uid", "group", "shard", "source", "size", "opened_at")},
        "prompt": prompts.get(_first_key(items), ""),
        "rollouts": len(rewards),
        "rewards": list(rewards.values()),
        "steps": sum(item.steps for item in items),
        "oldest_version": min((item.oldest_version for item in items if item.oldest_version is not None), default=None),
        "behind": max(item.behind for item in items),
        "from_history": first.from_history,
        "why": first.why,
    }


def prompt_beginning(step: Step, decoder: TokenDecoder) -> str:
    """The beginning of the first thing that a user says; of the whole prompt, if nobody is a user."""
    turns = read_turns(decoder.texts(step.prompt_ids[:BEGINNING_TOKENS].tolist()), [])
    said = next((turn.text for turn in turns if turn.role == "user"), turns[0].text if turns else "")
    return " ".join(said.split())[:BEGINNING_CHARACTERS]


def _request(request: BatchRequest | ExactFill) -> Row:
    step_filter = request.step_filter
    terms: Row = {"min_exactness": step_filter.min_exactness, "untrainable": step_filter.untrainable}
    if isinstance(request, ExactFill):
        return {"kind": "exact", "count": request.trajectories, "unit": "trajectories", **terms}
    fetch = {"count": request.count, "unit": request.unit, "order": request.order, "history": request.history}
    return {"kind": "fetch", **fetch, **terms}
