"""Scored groups as steps, and steps as scored groups.

A sequence is a trajectory of one step: the tokens before its first trained token are the prompt, the rest is the
response. A trajectory of several steps, which an agent recorded, becomes one sequence for each of its merged rows.

Invariants:
- `groups_from_columns(columns_from_group(g))` gives what was sent, with log-probabilities as float32.
- A prompt has at least one token, so that every trained token has a context. If an environment trains the first token,
  or gives log-probabilities before it, the extras record that.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepwell.steps.columns import Columns, cut, make_columns
from stepwell.steps.layout import IndexArray, offsets, trajectories_of
from stepwell.steps.rows import NO_VERSION, merge_rows
from stepwell.steps.sampling import read_temperature, untrainable_reason
from stepwell.steps.step import GRADES, BoolArray, FloatArray, Json, JsonObject, ids_array
from stepwell.wire.scored_groups import FILLER, ScoredGroup

GROUP = "group"
"""The key in the extras of a group's first step for the fields of the group."""
FIRST_TRAINED = "first_token_trained"
PROMPT_LOGPROBS = "prompt_logprobs"
OURS = (GROUP, FIRST_TRAINED, PROMPT_LOGPROBS)
SOLE_STEP = 0


def columns_from_group(
    group: ScoredGroup,
    prompt_uid: str,
    *,
    source: str,
    policy_version: int,
    arrived_at: float,
    trajectory_uids: Sequence[str] | None = None,
) -> Columns:
    """The group as steps of these trajectories, by default `{prompt_uid}-{n}`; `policy_version` is used where the group
    names none."""
    count = len(group)
    starts = offsets(group.lengths_N).tolist()
    middles = [start + _prompt_length(group.trained[start:end]) for start, end in pairwise(starts)]
    responses = [slice(middle, end) for middle, end in zip(middles, starts[1:], strict=True)]
    prompts_N = np.array(middles, np.int32) - np.array(starts[:-1], np.int32)
    versions = [policy_version if version is None else version for version in group.policy_versions]
    values = {
        "tokens": group.tokens,
        "logprobs": _response_logprobs(group, responses),
        "mask": np.concatenate([group.trained[response] for response in responses]),
        "prompt_lengths_S": prompts_N,
        "response_lengths_S": group.lengths_N.astype(np.int32) - prompts_N,
        "rewards_S": group.scores_N,
        "reward_revisions_S": np.ones(count, np.int32),
        "reward_sources": [source] * count,
        "step_indexes_S": np.full(count, SOLE_STEP, np.int32),
        "policy_versions_S": np.array(versions, np.int64),
        "is_last_S": np.ones(count, np.bool_),
        "started_at_S": np.full(count, arrived_at),
        "trajectory_uids": list(trajectory_uids or (f"{prompt_uid}-{place}" for place in range(count))),
        "prompt_uids": [prompt_uid] * count,
        "exactness": list(group.exactness),
        "extras": _step_extras(group, starts, middles),
        **_sampling(group),
    }
    return make_columns(count, values)


def groups_from_columns(columns: Columns, group_sizes: Sequence[int]) -> Iterator[ScoredGroup]:
    """The groups of a batch, by their numbers of steps. Each is made when it is asked for."""
    return map(_group, cut(columns, group_sizes))


def _prompt_length(trained: BoolArray) -> int:
    """Up to the first trained token, but at least one token; all but one if no token is trained."""
    first = int(trained.argmax())
    return max(1, first if trained[first] else len(trained) - 1)


def _response_logprobs(group: ScoredGroup, responses: Sequence[slice]) -> FloatArray:
    if group.logprobs is None:
        return np.full(sum(response.stop - response.start for response in responses), np.nan, np.float32)
    return np.concatenate([group.logprobs[response] for response in responses])


def _sampling(group: ScoredGroup) -> dict[str, Any]:
    """How each sequence was sampled: as it tells, else as the group's generation_params tell."""
    params = group.extras.get("generation_params")
    sampling = params if isinstance(params, dict) else {}
    told = [(own.get("temperatures"), own.get("untrainable"), own.get("models")) for own in group.extras_N]
    temperatures = [read_temperature(own, sampling) for own, _, _ in told]
    return {
        "temperatures_S": np.array(temperatures, np.float64),
        "untrainable": [
            reason if isinstance(reason, str) else untrainable_reason({**sampling, "temperature": temperature})
            for (_, reason, _), temperature in zip(told, temperatures, strict=True)
        ],
        "models": [model if isinstance(model, str) else "" for _, _, model in told],
        "sampling": [sampling] * len(group),
    }


def _step_extras(group: ScoredGroup, starts: Sequence[int], middles: Sequence[int]) -> list[JsonObject]:
    extras: list[dict[str, Json]] = [dict(own) for own in group.extras_N]
    for own, start in zip(extras, starts, strict=False):
        if group.trained[start]:
            own[FIRST_TRAINED] = True
    if group.logprobs is not None:
        _keep_prompt_logprobs(extras, group.logprobs, starts, middles)
    of_group = dict(group.extras) if group.env_id is None else {**group.extras, "env_id": group.env_id}
    if of_group:
        extras[0][GROUP] = of_group
    return list(extras)


def _keep_prompt_logprobs(
    extras: list[dict[str, Json]], logprobs: FloatArray, starts: Sequence[int], middles: Sequence[int]
) -> None:
    """Log-probabilities of prompts, for sequences in which they are not all the filler."""
    is_filler = logprobs == FILLER
    for own, start, middle, end in zip(extras, starts, middles, starts[1:], strict=False):
        is_usual = middle < end and is_filler[start:middle].all()
        if not is_usual and not np.isnan(logprobs[start]):
            own[PROMPT_LOGPROBS] = logprobs[start:middle].tolist()


def _group(columns: Columns) -> ScoredGroup:
    if len(set(columns.trajectory_uids)) == len(columns):
        return _of_single_steps(columns)
    return _of_trajectories(columns)


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


def _of_trajectories(columns: Columns) -> ScoredGroup:
    """A group that agents recorded, as merged rows. It has none of the fields that only environments send."""
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
    return ScoredGroup(
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


def _add_temperatures(extras: Sequence[dict[str, Json]], temperatures: Sequence[float]) -> None:
    """For sequences that an agent recorded: an environment tells its trainer how it samples."""
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
