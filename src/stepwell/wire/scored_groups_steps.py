"""Scored groups as steps, and steps as scored groups.

A sequence is a trajectory of one step: the tokens before its first trained token are the prompt, the rest is the
response. A trajectory of several steps, which an agent recorded, becomes one sequence for each of its merged rows.

Invariants:
- `groups_from_columns(columns_from_group(g))` gives what was sent, with log-probabilities as float32.
- A sequence has its own advantages where those that a trainer computes from the scores would be wrong: a rollout is
  several sequences, or rollouts of the group are left out.
- A prompt has at least one token, so that every trained token has a context. If an environment trains the first token,
  or gives log-probabilities before it, the extras record that.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from stepwell.steps.advantages import group_advantages
from stepwell.steps.columns import Columns, cut, make_columns
from stepwell.steps.layout import IndexArray, offsets, trajectories_of
from stepwell.steps.returns import NOTHING_LEFT_OUT, LeftOutSteps, whole_groups
from stepwell.steps.rows import NO_VERSION, merge_rows
from stepwell.steps.step import GRADES, BoolArray, FloatArray, Json, JsonObject, ids_array
from stepwell.steps.trainable import read_temperature, untrainable_reason
from stepwell.wire.scored_groups import FILLER, ScoredGroup

GROUP = "group"
"""The key in the extras of a group's first step for the fields of the group."""
FIRST_TRAINED = "first_token_trained"
PROMPT_LOGPROBS = "prompt_logprobs"
OURS = (GROUP, FIRST_TRAINED, PROMPT_LOGPROBS)
SOLE_STEP = 0
SAMPLED = frozenset(("temperatures", "untrainable", "models"))
"""Fields by which a sequence tells how it was sampled."""

D = TypeVar("D", bound=np.generic)


def columns_from_group(
    group: ScoredGroup, prompt_uid: str, *, source: str, policy_version: int, arrived_at: float
) -> Columns:
    """The columns, as from `columns_from_groups`, of one group whose trajectories are `{prompt_uid}-{n}`."""
    uids = [f"{prompt_uid}-{place}" for place in range(len(group))]
    return columns_from_groups(
        [group], [prompt_uid], uids, sources=[source], policy_version=policy_version, arrived_at=arrived_at
    )


def columns_from_groups(
    groups: Sequence[ScoredGroup],
    prompt_uids: Sequence[str],
    trajectory_uids: Sequence[str],
    *,
    sources: Sequence[str],
    policy_version: int,
    arrived_at: float,
) -> Columns:
    """Groups as steps, one after the other. There is a prompt_uid and a source for each group, and a trajectory_uid for
    each sequence; `policy_version` is used where a group names none."""
    sizes = list(map(len, groups))
    count = sum(sizes)
    lengths_N = _joined([group.lengths_N for group in groups])
    tokens, trained = _joined([group.tokens for group in groups]), _joined([group.trained for group in groups])
    logprobs = _known_logprobs(groups)
    starts_N = offsets(lengths_N)
    starts = starts_N.tolist()
    prompts_N = np.array([_prompt_length(trained[start:end]) for start, end in pairwise(starts)], np.int32)
    middles_N = starts_N[:-1] + prompts_N
    responses = list(map(slice, middles_N.tolist(), starts[1:]))
    response_lengths = lengths_N.astype(np.int32) - prompts_N
    versions = [policy_version if version is None else version for group in groups for version in group.policy_versions]
    values = {
        "tokens": tokens,
        "logprobs": np.full(response_lengths.sum(), np.nan, np.float32)
        if logprobs is None
        else np.concatenate([logprobs[response] for response in responses]),
        "mask": np.concatenate([trained[response] for response in responses]),
        "prompt_lengths_S": prompts_N,
        "response_lengths_S": response_lengths,
        "rewards_S": _joined([group.scores_N for group in groups]),
        "reward_revisions_S": np.ones(count, np.int32),
        "reward_sources": _repeated(sources, sizes),
        "step_indexes_S": np.full(count, SOLE_STEP, np.int32),
        "policy_versions_S": np.array(versions, np.int64),
        "is_last_S": np.ones(count, np.bool_),
        "started_at_S": np.full(count, arrived_at),
        "trajectory_uids": list(trajectory_uids),
        "prompt_uids": _repeated(prompt_uids, sizes),
        "exactness": [grade for group in groups for grade in group.exactness],
        "extras": _step_extras(groups, trained, logprobs, starts_N, middles_N),
        **_sampling(groups),
    }
    return make_columns(count, values)


def groups_from_columns(
    columns: Columns, group_sizes: Sequence[int], left_out: LeftOutSteps = NOTHING_LEFT_OUT
) -> Iterator[ScoredGroup]:
    """The groups of a batch, by their numbers of steps. Each is made when it is asked for."""
    for place, part in enumerate(cut(columns, group_sizes)):
        yield _group(part, left_out.chosen(np.flatnonzero(left_out.group_of_E == place)))


def _joined(parts: Sequence[NDArray[D]]) -> NDArray[D]:
    """End to end. Nothing is copied if each part follows the one before it in the memory of one array, as those of
    groups that were read together."""
    if len(parts) == 1:
        return parts[0]
    first, base = parts[0], parts[0].base
    if base is not None and all(part.base is base and part.flags.c_contiguous for part in parts):
        places: list[int] = [part.__array_interface__["data"][0] for part in parts]
        if all(place + part.nbytes == behind for part, (place, behind) in zip(parts, pairwise(places), strict=False)):
            return as_strided(first, (sum(map(len, parts)),), writeable=False)
    return np.concatenate(parts)


def _repeated(values: Sequence[str], sizes: Sequence[int]) -> list[str]:
    """Each value once for each sequence of its group."""
    return [value for value, size in zip(values, sizes, strict=True) for _ in range(size)]


def _known_logprobs(groups: Sequence[ScoredGroup]) -> FloatArray | None:
    """One per token, NaN in groups without; None if no group has any."""
    if all(group.logprobs is None for group in groups):
        return None
    return _joined(
        [
            np.full(len(group.tokens), np.nan, np.float32) if group.logprobs is None else group.logprobs
            for group in groups
        ]
    )


def _prompt_length(trained: BoolArray) -> int:
    """Up to the first trained token, but at least one token; all but one if no token is trained."""
    first = int(trained.argmax())
    return max(1, first if trained[first] else len(trained) - 1)


def with_temperature(group: ScoredGroup, temperature: float | None) -> ScoredGroup:
    """The group with this temperature for sequences of which neither they nor the group tell one."""
    params = group.extras.get("generation_params")
    if temperature is None or read_temperature(None, params if isinstance(params, dict) else {}) is not None:
        return group
    extras = [
        own if read_temperature(own.get("temperatures"), {}) is not None else {**own, "temperatures": temperature}
        for own in group.extras_N
    ]
    return replace(group, extras_N=extras)


def _sampling(groups: Sequence[ScoredGroup]) -> dict[str, Any]:
    """How each sequence was sampled: as it tells, else as its group's generation_params tell."""
    told = [of_sequence for group in groups for of_sequence in _sampled(group)]
    return {
        "temperatures_S": np.array([temperature for temperature, _, _, _ in told], np.float64),
        "untrainable": [reason for _, reason, _, _ in told],
        "models": [model for _, _, model, _ in told],
        "sampling": [sampling for _, _, _, sampling in told],
    }


def _sampled(group: ScoredGroup) -> Iterator[tuple[float | None, str | None, str, JsonObject]]:
    """Temperature, reason why it is not trained, model and parameters of each sequence."""
    params = group.extras.get("generation_params")
    sampling = params if isinstance(params, dict) else {}
    of_group = read_temperature(None, sampling)
    default = of_group, untrainable_reason({**sampling, "temperature": of_group}), "", sampling
    for own in group.extras_N:
        if SAMPLED.isdisjoint(own):
            yield default
            continue
        temperature = read_temperature(own.get("temperatures"), sampling)
        reason, model = own.get("untrainable"), own.get("models")
        if not isinstance(reason, str):
            reason = untrainable_reason({**sampling, "temperature": temperature})
        yield temperature, reason, model if isinstance(model, str) else "", sampling


def _step_extras(
    groups: Sequence[ScoredGroup],
    trained: BoolArray,
    logprobs: FloatArray | None,
    starts_N: IndexArray,
    middles_N: IndexArray,
) -> list[JsonObject]:
    extras: list[dict[str, Json]] = [dict(own) for group in groups for own in group.extras_N]
    for place in np.flatnonzero(trained[starts_N[:-1]]).tolist():
        extras[place][FIRST_TRAINED] = True
    if logprobs is not None:
        for place in _unusual_prompts(logprobs, starts_N, middles_N):
            extras[place][PROMPT_LOGPROBS] = logprobs[starts_N[place] : middles_N[place]].tolist()
    for group, place in zip(groups, accumulate(map(len, groups), initial=0), strict=False):
        of_group = dict(group.extras) if group.env_id is None else {**group.extras, "env_id": group.env_id}
        if of_group:
            extras[place][GROUP] = of_group
    return list(extras)


def _unusual_prompts(logprobs: FloatArray, starts_N: IndexArray, middles_N: IndexArray) -> list[int]:
    """The sequences with log-probabilities whose prompts have others than the filler, or that have no response."""
    differs = np.append(logprobs != FILLER, False)
    bounds = np.column_stack([starts_N[:-1], middles_N]).ravel()
    is_unusual_N = np.logical_or.reduceat(differs, bounds)[::2] | (middles_N == starts_N[1:])
    places: list[int] = np.flatnonzero(is_unusual_N & ~np.isnan(logprobs[starts_N[:-1]])).tolist()
    return places


def _group(columns: Columns, left_out: LeftOutSteps) -> ScoredGroup:
    uids = list(dict.fromkeys(columns.trajectory_uids))
    if len(uids) == len(columns):
        group, trajectory_of_R = _of_single_steps(columns), np.arange(len(uids))
    else:
        group, trajectory_of_R = _of_trajectories(columns)
    returns_T = np.empty(len(uids))
    returns_T[trajectory_of_R] = group.scores_N
    left_out = replace(left_out, group_of_E=np.zeros(len(left_out), np.int64))
    whole = whole_groups(left_out, uids, np.zeros(len(uids), np.int64), returns_T)
    if len(whole.returns_T) == len(group):
        return group
    advantages_T = group_advantages(whole.returns_T, whole.group_of_T)
    return replace(group, extras_N=_with_advantages(group, advantages_T[trajectory_of_R]))


def _with_advantages(group: ScoredGroup, advantages_R: NDArray[np.float64]) -> list[JsonObject]:
    """One for each token, as Atropos defines them: 0 where it is not trained. An unscored rollout has none."""
    spans = pairwise(offsets(group.lengths_N).tolist())
    return [
        own
        if math.isnan(advantage)
        else {"advantages": np.where(group.trained[start:end], advantage, 0.0).tolist(), **own}
        for own, (start, end), advantage in zip(group.extras_N, spans, advantages_R.tolist(), strict=True)
    ]


def _of_single_steps(columns: Columns) -> ScoredGroup:
    starts = columns.token_offsets_S
    trained, logprobs = _whole_sequences(columns, starts.tolist())
    of_group = columns.extras[0].get(GROUP, {})
    extras = dict(of_group) if isinstance(of_group, dict) else {}
    env_id = extras.pop("env_id", None)
    own_extras = [{name: value for name, value in own.items() if name not in OURS} for own in columns.extras]
    params = extras.get("generation_params")
    if read_temperature(None, params if isinstance(params, dict) else {}) is None:
        _add_temperatures(own_extras, columns.temperatures_S.tolist())
    return ScoredGroup(
        tokens=columns.tokens,
        trained=trained,
        logprobs=logprobs,
        lengths_N=np.diff(starts),
        scores_N=np.where(np.isnan(columns.returns_S), columns.rewards_S, columns.returns_S),
        policy_versions=_oldest_versions(columns),
        exactness=columns.exactness,
        extras_N=own_extras,
        extras=extras,
        env_id=env_id if isinstance(env_id, int) else None,
    )


def _whole_sequences(columns: Columns, starts: Sequence[int]) -> tuple[BoolArray, FloatArray | None]:
    """Mask and log-probabilities of prompts and responses. The latter are None if no sequence has them."""
    trained, logprobs = np.zeros(starts[-1], np.bool_), np.full(starts[-1], FILLER, np.float32)
    responses = offsets(columns.response_lengths_S).tolist()
    has_any = False
    for place, (extras, (start, end)) in enumerate(zip(columns.extras, pairwise(starts), strict=True)):
        response = slice(responses[place], responses[place + 1])
        middle, known = end - (response.stop - response.start), extras.get(PROMPT_LOGPROBS)
        trained[middle:end] = columns.mask[response]
        trained[start] |= FIRST_TRAINED in extras
        logprobs[middle:end] = columns.logprobs[response]
        if isinstance(known, list):
            logprobs[start:middle] = np.array(known, np.float32)
        elif middle == end or np.isnan(columns.logprobs[response]).any():
            logprobs[start:end] = np.nan
            continue
        has_any = True
    return trained, logprobs if has_any else None


def _oldest_versions(columns: Columns) -> list[int]:
    return [
        min((span.version for span in spans), default=version)
        for spans, version in zip(columns.version_spans, columns.policy_versions_S.tolist(), strict=True)
    ]


def _of_trajectories(columns: Columns) -> tuple[ScoredGroup, IndexArray]:
    """A group that agents recorded, as merged rows, and the rollout of each. It has none of the fields that only
    environments send."""
    trajectory_of_S = trajectories_of(columns.trajectory_uids, ids_array([len(columns)]))
    rows = merge_rows(columns, trajectory_of_S, np.zeros(len(set(columns.trajectory_uids)), np.int64))
    lengths_N = np.diff(rows.offsets_R)
    logprobs = None
    if rows.has_logprobs_R.any():
        logprobs = np.where(rows.versions == NO_VERSION, np.float32(FILLER), rows.logprobs)
        logprobs[np.repeat(~rows.has_logprobs_R, lengths_N)] = np.nan
    grades = [[columns.exactness[step] for step in steps] for steps in rows.steps_of_R]
    own_extras: list[dict[str, Json]] = [{} for _ in range(len(rows))]
    _add_temperatures(own_extras, [_common(columns.temperatures_S[steps]) for steps in rows.steps_of_R])
    group = ScoredGroup(
        tokens=rows.tokens,
        trained=rows.loss_mask,
        logprobs=logprobs,
        lengths_N=lengths_N,
        scores_N=rows.rewards_R,
        policy_versions=_oldest_written(rows.versions, rows.offsets_R),
        exactness=[max(own, key=GRADES.__getitem__) for own in grades],
        extras_N=own_extras,
        extras={},
        env_id=None,
    )
    return group, rows.trajectory_of_R


def _add_temperatures(extras: Sequence[dict[str, Json]], temperatures: Sequence[float]) -> None:
    """Adds temperatures to sequences that an agent recorded: an environment tells its trainer how it samples."""
    for own, temperature in zip(extras, temperatures, strict=True):
        if not math.isnan(temperature):
            own.setdefault("temperatures", temperature)


def _common(temperatures: NDArray[np.float64]) -> float:
    """NaN if they differ, or if one is not known."""
    first = float(temperatures[0])
    return first if (temperatures == first).all() else math.nan


def _oldest_written(versions: NDArray[np.int64], starts: IndexArray) -> list[int]:
    oldest = []
    for start, end in pairwise(starts.tolist()):
        own = versions[start:end]
        oldest.append(int(own[own != NO_VERSION].min(initial=np.iinfo(np.int64).max)))
    return oldest
