"""Many steps as a few flat arrays: the one form in which steps travel.

A message costs the same whatever its size, and a list of Python ints costs ten times its bytes; so steps are packed
before they leave a process. What always holds: `unpack(pack(steps))` gives the same steps in the same order, and the
arrays of a packed message can be read from shared memory without a copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from stepwell.steps.step import BoolArray, Exactness, FloatArray, IntArray, JsonObject, Step, VersionSpan

D = TypeVar("D", bound=np.generic)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Columns:
    """S steps, column by column."""

    tokens: IntArray
    """Each step's prompt, then its response, step after step."""
    logprobs: FloatArray
    """One a response token; NaN throughout a step that has none."""
    mask: BoolArray
    """One a response token: is it trained?"""
    prompt_lengths_S: IntArray
    response_lengths_S: IntArray
    rewards_S: NDArray[np.float64]
    """NaN where no one has scored."""
    reward_revisions_S: IntArray
    step_indexes_S: IntArray
    policy_versions_S: NDArray[np.int64]
    is_last_S: BoolArray
    started_at_S: NDArray[np.float64]
    trajectory_uids: list[str]
    prompt_uids: list[str]
    uids: list[str]
    reward_sources: list[str]
    metadata: list[JsonObject]
    version_spans: list[tuple[VersionSpan, ...]]
    exactness: list[Exactness]
    finish_reasons: list[str | None]
    sampling: list[JsonObject]
    extras: list[JsonObject]
    quarantine: list[str | None]
    untrainable: list[str | None]

    def __len__(self) -> int:
        return len(self.uids)


COLUMN_NAMES = tuple(field.name for field in fields(Columns))


def pack(steps: Sequence[Step]) -> Columns:
    return Columns(
        tokens=join([part for s in steps for part in (s.prompt_ids, s.response_ids)], np.int32),
        logprobs=join([_logprobs(s) for s in steps], np.float32),
        mask=join([_mask(s) for s in steps], np.bool_),
        prompt_lengths_S=np.array([len(s.prompt_ids) for s in steps], np.int32),
        response_lengths_S=np.array([len(s.response_ids) for s in steps], np.int32),
        rewards_S=np.array([np.nan if s.reward is None else s.reward for s in steps], np.float64),
        reward_revisions_S=np.array([s.reward_revision for s in steps], np.int32),
        step_indexes_S=np.array([s.step_index for s in steps], np.int32),
        policy_versions_S=np.array([s.policy_version for s in steps], np.int64),
        is_last_S=np.array([s.is_last for s in steps], np.bool_),
        started_at_S=np.array([s.started_at for s in steps], np.float64),
        trajectory_uids=[s.trajectory_uid for s in steps],
        prompt_uids=[s.prompt_uid for s in steps],
        uids=[s.uid for s in steps],
        reward_sources=[s.reward_source for s in steps],
        metadata=[s.metadata for s in steps],
        version_spans=[s.version_spans for s in steps],
        exactness=[s.exactness for s in steps],
        finish_reasons=[s.finish_reason for s in steps],
        sampling=[s.sampling for s in steps],
        extras=[s.extras for s in steps],
        quarantine=[s.quarantine for s in steps],
        untrainable=[s.untrainable for s in steps],
    )


def unpack(columns: Columns, *, copy: bool) -> list[Step]:
    """The steps. With `copy`, each owns its arrays, so that keeping one step does not keep the whole message alive."""
    own = np.copy if copy else np.asarray
    prompt_lengths, response_lengths = columns.prompt_lengths_S.tolist(), columns.response_lengths_S.tolist()
    rewards, indexes = columns.rewards_S.tolist(), columns.step_indexes_S.tolist()
    versions, lasts, starts = (
        columns.policy_versions_S.tolist(),
        columns.is_last_S.tolist(),
        columns.started_at_S.tolist(),
    )
    revisions = columns.reward_revisions_S.tolist()
    steps: list[Step] = []
    token_at = response_at = 0
    for i in range(len(columns)):
        prompt, response = prompt_lengths[i], response_lengths[i]
        tokens = own(columns.tokens[token_at : token_at + prompt + response])
        logprobs = columns.logprobs[response_at : response_at + response]
        mask = columns.mask[response_at : response_at + response]
        token_at += prompt + response
        response_at += response
        steps.append(
            Step(
                prompt_ids=tokens[:prompt],
                response_ids=tokens[prompt:],
                response_logprobs=None if response == 0 or np.isnan(logprobs[0]) else own(logprobs),
                response_mask=None if mask.all() else own(mask),
                reward=None if rewards[i] != rewards[i] else rewards[i],
                reward_source=columns.reward_sources[i],
                reward_revision=revisions[i],
                step_index=indexes[i],
                policy_version=versions[i],
                is_last=lasts[i],
                started_at=starts[i],
                trajectory_uid=columns.trajectory_uids[i],
                prompt_uid=columns.prompt_uids[i],
                uid=columns.uids[i],
                metadata=columns.metadata[i],
                version_spans=columns.version_spans[i],
                exactness=columns.exactness[i],
                finish_reason=columns.finish_reasons[i],
                sampling=columns.sampling[i],
                extras=columns.extras[i],
                quarantine=columns.quarantine[i],
                untrainable=columns.untrainable[i],
            )
        )
    return steps


def cut(columns: Columns, sizes: Sequence[int]) -> list[Columns]:
    """The first so many steps, then the next, …, as views."""
    tokens = [0, *np.cumsum(columns.prompt_lengths_S + columns.response_lengths_S, dtype=np.int64).tolist()]
    responses = [0, *np.cumsum(columns.response_lengths_S, dtype=np.int64).tolist()]

    def piece(start: int, end: int) -> Columns:
        of_responses = slice(responses[start], responses[end])
        flat = {"tokens": slice(tokens[start], tokens[end]), "logprobs": of_responses, "mask": of_responses}
        values: dict[str, Any] = {
            name: getattr(columns, name)[flat.get(name, slice(start, end))] for name in COLUMN_NAMES
        }
        return Columns(**values)

    return [piece(start, end) for start, end in pairwise(accumulate(sizes, initial=0))]


def stack(parts: Sequence[Columns]) -> Columns:
    """The steps of the first, then those of the second, …; a single part is returned as it is."""
    if len(parts) == 1:
        return parts[0]

    def whole(name: str) -> Any:
        values = [getattr(part, name) for part in parts]
        if isinstance(values[0], np.ndarray):
            return np.concatenate(values)
        return [value for of_part in values for value in of_part]

    return Columns(**{name: whole(name) for name in COLUMN_NAMES})


def _logprobs(step: Step) -> FloatArray:
    if step.response_logprobs is None:
        return np.full(len(step.response_ids), np.nan, np.float32)
    return step.response_logprobs


def _mask(step: Step) -> BoolArray:
    return np.ones(len(step.response_ids), np.bool_) if step.response_mask is None else step.response_mask


def join(parts: list[NDArray[D]], dtype: type[D]) -> NDArray[D]:
    """End to end; no parts at all are an empty array."""
    return np.concatenate(parts) if parts else np.empty(0, dtype)
