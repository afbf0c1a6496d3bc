"""Batches for verl, as a `DataProto` with verl's names.

    data = to_data_proto(pool.fetch_batch(64, lease=600), prompt_length=2048, response_length=512, pad_id=0)

- Nothing is cut off.
- Unscored rollouts are left out: a reward of 0 would be wrong.
- The last response token of each row has the rollout's return.
- verl's own advantage functions treat every row as a rollout. If a rollout has several rows, use `advantages`, which
  are computed per rollout.
"""

from dataclasses import dataclass, replace
from importlib import import_module
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stepwell.errors import BadRequest
from stepwell.steps.advantages import group_advantages
from stepwell.steps.columns import Columns, cut, stack
from stepwell.steps.layout import IndexArray, parts_of
from stepwell.steps.padding import Overlong, PaddedSteps, pad_steps
from stepwell.trainers.ports import TrainingBatch

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


def to_data_proto(
    batch: TrainingBatch,
    *,
    prompt_length: int,
    response_length: int,
    pad_id: int,
    merged: bool = False,
    overlong: Overlong = "raise",
) -> DataProto:
    """One row per step; with `merged`, one per chain of steps that extend one another, so no token is computed twice.

    A row that is too long raises an error, or is left out with `overlong="drop"`.
    """
    verl, torch = _imported()
    rows = verl_rows(
        batch,
        prompt_length=prompt_length,
        response_length=response_length,
        pad_id=pad_id,
        merged=merged,
        overlong=overlong,
    )
    tensors = {name: torch.from_numpy(array) for name, array in rows.tensors.items()}
    return verl.DataProto.from_dict(tensors, rows.labels, meta_info={"unscored_rollouts": rows.unscored})


def _imported() -> tuple[ModuleType, ModuleType]:
    try:
        return import_module("verl"), import_module("torch")
    except ModuleNotFoundError as missing:
        raise BadRequest(f"a DataProto needs verl, and {missing.name} is not installed: pip install verl") from missing


def verl_rows(
    batch: TrainingBatch, *, prompt_length: int, response_length: int, pad_id: int, merged: bool, overlong: Overlong
) -> VerlRows:
    columns, trajectory_of_R = _merged(batch) if merged else (batch.columns, batch.trajectory_of_S)
    scored = np.flatnonzero(~np.isnan(batch.rewards_T[trajectory_of_R]))
    if not len(scored):
        raise BadRequest("no rollout of this batch is scored: there is nothing to train")
    pieces = cut(columns, [1] * len(columns))
    columns, trajectory_of_R = stack([pieces[row] for row in scored.tolist()]), trajectory_of_R[scored]
    columns = replace(columns, rewards_S=batch.rewards_T[trajectory_of_R])
    padded = pad_steps(columns, prompt_length, response_length, pad_id=pad_id, overlong=overlong)
    trajectory_of_R = trajectory_of_R[padded.kept_S]
    advantages_T = group_advantages(batch.rewards_T, batch.group_of_T)
    return VerlRows(
        _tensors(padded, advantages_T[trajectory_of_R]),
        _labels(batch, padded, trajectory_of_R),
        int(np.isnan(batch.rewards_T).sum()),
    )


def _tensors(padded: PaddedSteps, advantages_R: NDArray[np.float64]) -> dict[str, NDArray[Any]]:
    advantages_R_T = (advantages_R[:, None] * padded.response_mask_S_R).astype(np.float32)
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


def _merged(batch: TrainingBatch) -> tuple[Columns, IndexArray]:
    """Merged rows as if each were one step: the prompt of the first step, and all tokens after it as the response.

    A row's other fields are those of its last step, except the policy version, which is the oldest.
    """
    merged, columns = batch.merged(), batch.columns
    without_tokens = replace(columns, added=columns.added[:0], bases=None)  # the merged rows have them
    steps_of_R, pieces = merged.steps_of_R, cut(without_tokens, [1] * len(columns))
    lengths_R = np.diff(merged.offsets_R)
    prompts_R = columns.prompt_lengths_S[[steps[0] for steps in steps_of_R]]
    places = np.arange(lengths_R.sum()) - np.repeat(merged.offsets_R[:-1], lengths_R)
    follows = places >= prompts_R[parts_of(lengths_R)]
    responses_R = (lengths_R - prompts_R).astype(np.int32)
    lacks = np.repeat(~merged.has_logprobs_R, responses_R)
    rows = replace(
        stack([pieces[steps[-1]] for steps in steps_of_R]),
        added=merged.tokens,
        logprobs=np.where(lacks, np.float32(np.nan), merged.logprobs[follows]),
        mask=merged.loss_mask[follows],
        prompt_lengths_S=prompts_R,
        response_lengths_S=responses_R,
        policy_versions_S=np.array([columns.policy_versions_S[steps].min() for steps in steps_of_R]),
    )
    return rows, merged.trajectory_of_R
