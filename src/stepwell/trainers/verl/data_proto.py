"""Batches for verl, as a `DataProto` with verl's names.

    data = to_data_proto(pool.fetch_batch(64, lease=600), prompt_length=2048, response_length=512, pad_id=0)

- Nothing is cut off.
- Unscored rollouts are left out: a reward of 0 would be wrong.
- verl divides all logits by one temperature, so steps of another one are left out and counted.
- The last response token of each row has the rollout's return.
- verl's own advantage functions treat every row as a rollout. If a rollout has several rows, or with step rewards, use
  `advantages`, which are those of the reference trainer (trainers/rows.py).
"""

from dataclasses import dataclass, replace
from importlib import import_module
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stepwell.errors import BadRequest
from stepwell.steps.advantages import AdvantageKind, BaselineKind
from stepwell.steps.columns import Columns, cut, stack
from stepwell.steps.credit import CreditKind
from stepwell.steps.layout import IndexArray, offsets, parts_of
from stepwell.steps.padding import Overlong, PaddedSteps, pad_steps, spread
from stepwell.steps.rows import MergedRows
from stepwell.steps.step import BoolArray, FloatArray
from stepwell.trainers.comparison import response_advantages, unusable_advantages
from stepwell.trainers.ports import TrainingBatch
from stepwell.trainers.rows import is_missing, place_responses, step_temperatures
from stepwell.trainers.settings import RowSettings

DataProto: TypeAlias = Any
"""verl's class; Any, because verl is optional."""


@dataclass(frozen=True, slots=True, eq=False)
class VerlRows:
    """The parts of a DataProto."""

    tensors: dict[str, NDArray[Any]]
    labels: dict[str, NDArray[np.object_]]
    """verl's non-tensors. `uid` names the group: a prompt that comes again is another group."""
    unscored: int
    """Number of rollouts left out."""
    steps_left_out: int
    """Number of steps of another or an unknown temperature, or with advantages of their own that cannot be used."""
    rows_too_long: int
    """Number of rows left out by `overlong="drop"`."""
    rows_without_logprobs: int
    """If there is any, no row has `rollout_log_probs`: verl computes its own, as of its current weights."""


def to_data_proto(
    batch: TrainingBatch,
    *,
    prompt_length: int,
    response_length: int,
    pad_id: int,
    merged: bool = False,
    overlong: Overlong = "raise",
    temperature: float = 1.0,
    assumed_temperature: float | None = 1.0,
    advantage: AdvantageKind = "rollout",
    credit: CreditKind = "root",
    baseline: BaselineKind = "group",
    fallback_baseline: BaselineKind = "batch",
    divide_by_std: bool = True,
) -> DataProto:
    """One row per step; with `merged`, one per chain of steps that extend one another, so no token is computed twice.

    A row that is too long raises an error, or is left out with `overlong="drop"`. `temperature` is that of verl's
    rollouts; steps of another one are left out, and steps that do not tell theirs are taken for sampled at
    `assumed_temperature`, or left out if that is None. `advantage`, `credit` and the baselines are as in Settings;
    `running` knows no earlier batch here, so it compares within this one.
    """
    verl, torch = _imported()
    rows = verl_rows(
        batch,
        RowSettings(
            advantage=advantage,
            credit=credit,
            baseline=baseline,
            fallback_baseline=fallback_baseline,
            divide_by_std=divide_by_std,
            temperature=temperature,
            assumed_temperature=assumed_temperature,
        ),
        prompt_length=prompt_length,
        response_length=response_length,
        pad_id=pad_id,
        merged=merged,
        overlong=overlong,
    )
    tensors = {name: torch.from_numpy(array) for name, array in rows.tensors.items()}
    told = {
        "unscored_rollouts": rows.unscored,
        "steps_left_out": rows.steps_left_out,
        "rows_too_long": rows.rows_too_long,
        "rows_without_logprobs": rows.rows_without_logprobs,
        "temperature": temperature,
    }
    return verl.DataProto.from_dict(tensors, rows.labels, meta_info=told)


def _imported() -> tuple[ModuleType, ModuleType]:
    try:
        return import_module("verl"), import_module("torch")
    except ModuleNotFoundError as missing:
        raise BadRequest(f"a DataProto needs verl, and {missing.name} is not installed: pip install verl") from missing


def verl_rows(
    batch: TrainingBatch,
    settings: RowSettings,
    *,
    prompt_length: int,
    response_length: int,
    pad_id: int,
    merged: bool,
    overlong: Overlong,
) -> VerlRows:
    columns, trajectory_of_R = batch.columns, batch.trajectory_of_S
    temperatures_S, is_unknown_S, is_other_S = step_temperatures(columns, settings)
    advantages = response_advantages(batch, settings)
    kept_R = ~is_unknown_S & ~is_other_S & ~unusable_advantages(columns)
    of_tokens = {
        "trained": columns.mask & np.repeat(kept_R, columns.response_lengths_S),
        "advantages": np.nan_to_num(advantages),
        "temperatures": np.repeat(temperatures_S, columns.response_lengths_S),
    }
    steps_left_out = int((~kept_R).sum())
    if merged:
        rows = batch.merged()
        columns, is_response = _merged_columns(batch, rows)
        of_tokens = {name: place_responses(rows, values)[is_response] for name, values in of_tokens.items()}
        kept_R, trajectory_of_R = np.bincount(rows.row_of_S, kept_R, len(rows)) > 0, rows.trajectory_of_R
    if not (kept_R := kept_R & ~np.isnan(batch.returns_T[trajectory_of_R])).any():
        if np.isnan(batch.returns_T).all():
            raise BadRequest("no rollout of this batch is scored: there is nothing to train")
        raise BadRequest(
            f"{steps_left_out} of {len(batch.columns)} steps have another or an unknown temperature, or unusable "
            "advantages, and the others are unscored: there is nothing to train. Pass the temperature of the samples, "
            "or assumed_temperature"
        )
    of_kept, pieces = np.repeat(kept_R, columns.response_lengths_S), cut(columns, [1] * len(columns))
    of_tokens = {name: values[of_kept] for name, values in of_tokens.items()}
    trajectory_of_R = trajectory_of_R[kept_R]
    columns = stack([pieces[row] for row in np.flatnonzero(kept_R).tolist()])
    is_trained = of_tokens["trained"].astype(np.bool_)
    columns = replace(
        columns,
        rewards_S=batch.returns_T[trajectory_of_R],
        logprobs=np.where(is_trained & is_missing(columns.logprobs), np.float32(np.nan), columns.logprobs),
        mask=is_trained,
    )
    padded = pad_steps(columns, prompt_length, response_length, pad_id=pad_id, overlong=overlong)
    at, lengths = offsets(columns.response_lengths_S)[padded.kept_S], columns.response_lengths_S[padded.kept_S]

    def padded_floats(name: str) -> FloatArray:
        values_R_T = np.zeros((len(at), response_length), np.float32)
        return spread(of_tokens[name], at, lengths, values_R_T) * padded.response_mask_S_R.astype(np.float32)

    return VerlRows(
        _tensors(padded, padded_floats("advantages"), padded_floats("temperatures")),
        _labels(batch, padded, trajectory_of_R[padded.kept_S]),
        int(np.isnan(batch.returns_T).sum()),
        steps_left_out,
        len(columns) - len(padded.kept_S),
        int((~padded.has_logprobs_S).sum()),
    )


def _tensors(padded: PaddedSteps, advantages_R_T: FloatArray, temperatures_R_T: FloatArray) -> dict[str, NDArray[Any]]:
    tensors: dict[str, NDArray[Any]] = {
        "prompts": np.ascontiguousarray(padded.prompts_S_P),
        "responses": np.ascontiguousarray(padded.responses_S_R),
        "input_ids": padded.input_ids_S_T,
        "attention_mask": padded.attention_mask_S_T,
        "position_ids": padded.position_ids_S_T,
        "response_mask": padded.response_mask_S_R,
        "token_level_scores": padded.token_level_rewards_S_R,
        "token_level_rewards": padded.token_level_rewards_S_R.copy(),
        "advantages": advantages_R_T,
        "returns": advantages_R_T.copy(),
        "temperatures": temperatures_R_T,
    }
    if padded.has_logprobs_S.all():  # of all rows or of none: if the tensor is missing, verl computes its own
        tensors["rollout_log_probs"] = padded.rollout_log_probs_S_R
    return tensors


def _labels(batch: TrainingBatch, padded: PaddedSteps, trajectory_of_R: IndexArray) -> dict[str, NDArray[np.object_]]:
    _, firsts_T = np.unique(batch.trajectory_of_S, return_index=True)
    _, firsts_G = np.unique(batch.group_of_T, return_index=True)
    uids_G = [batch.columns.trajectory_uids[step] for step in firsts_T[firsts_G].tolist()]
    values: dict[str, list[Any]] = {
        "uid": [uids_G[group] for group in batch.group_of_T[trajectory_of_R].tolist()],
        "prompt_uid": padded.prompt_uids,
        "trajectory_uid": padded.trajectory_uids,
        "step_index": padded.step_indexes_S.tolist(),
        "policy_version": padded.policy_versions_S.tolist(),
    }
    return {name: np.array(of_rows, dtype=object) for name, of_rows in values.items()}


def _merged_columns(batch: TrainingBatch, merged: MergedRows) -> tuple[Columns, BoolArray]:
    """Merged rows as if each were one step: the prompt of the first step, and all tokens after it as the response; and
    which of the rows' tokens are in these responses.

    A row's other fields are those of its last step, except the policy version, which is the oldest.
    """
    columns = batch.columns
    without_tokens = replace(columns, added=columns.added[:0], bases=None)  # the merged rows have them
    steps_of_R, pieces = merged.steps_of_R, cut(without_tokens, [1] * len(columns))
    lengths_R = np.diff(merged.offsets_R)
    prompts_R = columns.prompt_lengths_S[[steps[0] for steps in steps_of_R]]
    places = np.arange(lengths_R.sum()) - np.repeat(merged.offsets_R[:-1], lengths_R)
    is_response: BoolArray = places >= prompts_R[parts_of(lengths_R)]
    responses_R = (lengths_R - prompts_R).astype(np.int32)
    lacks = np.repeat(~merged.has_logprobs_R, responses_R)
    rows = replace(
        stack([pieces[steps[-1]] for steps in steps_of_R]),
        added=merged.tokens,
        logprobs=np.where(lacks, np.float32(np.nan), merged.logprobs[is_response]),
        mask=merged.loss_mask[is_response],
        prompt_lengths_S=prompts_R,
        response_lengths_S=responses_R,
        policy_versions_S=np.array([columns.policy_versions_S[steps].min() for steps in steps_of_R]),
    )
    return rows, is_response
