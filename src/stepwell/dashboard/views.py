"""Trajectories and groups in the form that the page shows, made from steps. Pure, but slow: call it in a thread."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from stepwell.common.tokenizers import TokenDecoder
from stepwell.dashboard.index import TrajectoryKey, key_of
from stepwell.pool.api.watching import TrajectorySnapshot, TrajectoryState
from stepwell.steps.advantages import group_advantages
from stepwell.steps.conversation import read_turns, shared_length
from stepwell.steps.step import SHOWN, IntArray, Step

PROMPT_TOKENS = 4_000
LAST_CHARACTERS = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseTokens:
    ids: Sequence[int]
    texts: Sequence[str]
    """Empty without a tokenizer."""
    logprobs: Sequence[float | None]
    trained: Sequence[bool]
    versions: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTokens:
    ids: Sequence[int]
    texts: Sequence[str]
    cut: int
    """Tokens that were left out before these."""


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
        "prompt_tokens": _prompt_tokens(new, prompt_texts),
    }


def _response_tokens(step: Step, texts: Sequence[str]) -> ResponseTokens:
    length = len(step.response_ids)
    logprobs = [None] * length if step.response_logprobs is None else step.response_logprobs.tolist()
    versions = [step.policy_version] * length
    for span in step.version_spans:
        versions[span.start : span.end] = [span.version] * (min(span.end, length) - span.start)
    return ResponseTokens(
        ids=step.response_ids.tolist(),
        texts=texts,
        logprobs=[value if value is not None and math.isfinite(value) else None for value in logprobs],
        trained=[True] * length if step.response_mask is None else step.response_mask.tolist(),
        versions=versions,
    )


def _prompt_tokens(new: IntArray, texts: Sequence[str]) -> PromptTokens:
    return PromptTokens(
        ids=new[-PROMPT_TOKENS:].tolist(), texts=texts[-PROMPT_TOKENS:], cut=max(0, len(new) - PROMPT_TOKENS)
    )
