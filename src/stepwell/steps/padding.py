"""Steps as the rectangles that most trainers take: prompts padded on the left, responses on the right, one row a step.

- Nothing is truncated. A step that is too long is refused, or left out, and the caller sees which ones are left.
- Padded arrays are int64 and float32, masks too: models index with them, and trainers compute `1 - mask`.
- There is no NaN. A missing value is 0, and a flag says that it is missing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from stepwell.errors import BadRequest
from stepwell.steps.columns import Columns
from stepwell.steps.layout import IndexArray, offsets
from stepwell.steps.step import BoolArray, FloatArray, IntArray

D = TypeVar("D", bound=np.generic)
Overlong: TypeAlias = Literal["raise", "drop"]
Limited: TypeAlias = Mapping[str, tuple[NDArray[np.signedinteger], int]]
"""The length in every row and the largest allowed length, by a description of what is limited."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PaddedSteps(ArrayRecord):
    """S steps in rows of T = P + R tokens. In each row the response begins at column P, right behind its prompt."""

    prompts_S_P: IndexArray
    """A view of `input_ids_S_T`, like the responses."""
    responses_S_R: IndexArray
    input_ids_S_T: IndexArray
    attention_mask_S_T: IndexArray
    position_ids_S_T: IndexArray
    """Counted from 0 at the first token. Padding before it has 0, padding at the end has the position of the last."""
    response_mask_S_R: IndexArray
    """1 on the tokens that are trained."""
    rollout_log_probs_S_R: FloatArray
    has_logprobs_S: BoolArray
    token_level_rewards_S_R: FloatArray
    """The step's own reward on its last response token."""
    scored_S: BoolArray
    """False where no one has given a reward. The rewards of such a row are 0."""
    returns_S: NDArray[np.float64]
    """The return of each row's trajectory, which also counts what is in no row; NaN if there is no reward."""
    prompt_uids: list[str]
    trajectory_uids: list[str]
    step_indexes_S: IntArray
    policy_versions_S: IndexArray
    temperatures_S: FloatArray
    """The temperature at which each row's response was sampled; 0 if it is not known. A trainer divides the logits by
    it."""
    kept_S: IndexArray
    """The batch's steps that have a row: all, unless overlong ones were dropped."""


def pad_steps(
    columns: Columns, prompt_length: int, response_length: int, *, pad_id: int, overlong: Overlong
) -> PaddedSteps:
    limited = {
        f"prompts are longer than {prompt_length}": (columns.prompt_lengths_S, prompt_length),
        f"responses are longer than {response_length}": (columns.response_lengths_S, response_length),
    }
    kept = fitting(limited, overlong)
    prompts, responses = columns.prompt_lengths_S[kept], columns.response_lengths_S[kept]
    tokens_at = columns.token_offsets_S[kept]
    responses_at = offsets(columns.response_lengths_S)[kept]
    total, starts = prompts + responses, prompt_length - prompts
    wide, narrow = prompt_length + response_length, response_length
    ids = spread(columns.tokens, tokens_at, total, np.full((len(kept), wide), pad_id, np.int64), starts)
    trained = spread(columns.mask, responses_at, responses, np.zeros((len(kept), narrow), np.int64))
    has_logprobs = columns.has_logprobs_S
    logprobs = spread(columns.logprobs, responses_at, responses, np.zeros((len(kept), narrow), np.float32))
    logprobs[~has_logprobs[kept]] = 0
    return PaddedSteps(
        prompts_S_P=ids[:, :prompt_length],
        responses_S_R=ids[:, prompt_length:],
        input_ids_S_T=ids,
        attention_mask_S_T=ones(starts, total, wide),
        position_ids_S_T=_positions(starts, total, wide),
        response_mask_S_R=trained,
        rollout_log_probs_S_R=logprobs,
        has_logprobs_S=has_logprobs[kept],
        token_level_rewards_S_R=_on_last_token(columns.rewards_S[kept], responses, narrow),
        scored_S=~np.isnan(columns.rewards_S[kept]),
        returns_S=columns.returns_S[kept],
        prompt_uids=[columns.prompt_uids[i] for i in kept],
        trajectory_uids=[columns.trajectory_uids[i] for i in kept],
        step_indexes_S=columns.step_indexes_S[kept],
        policy_versions_S=columns.policy_versions_S[kept],
        temperatures_S=np.nan_to_num(columns.temperatures_S[kept]).astype(np.float32),
        kept_S=kept,
    )


def fitting(limited: Limited, overlong: Overlong) -> IndexArray:
    """The rows within all limits. BadRequest if there are others and they are not to be dropped."""
    too_long = {what: lengths > longest for what, (lengths, longest) in limited.items()}
    if overlong != "drop" and any(rows.any() for rows in too_long.values()):
        found = "; ".join(
            f"{rows.sum()} of {len(rows)} {what} tokens, the longest has {limited[what][0].max()}"
            for what, rows in too_long.items()
            if rows.any()
        )
        raise BadRequest(f"{found}. Raise the limit, or pass overlong='drop' to leave such rows out (see kept_*)")
    return np.flatnonzero(~np.logical_or.reduce(list(too_long.values())))


def spread(
    flat: NDArray[np.generic],
    at_N: IndexArray,
    lengths_N: NDArray[np.signedinteger],
    into_N_W: NDArray[D],
    starts_N: NDArray[np.signedinteger] | None = None,
) -> NDArray[D]:
    """Copy `flat[at:at + length]` into each row from column `start` on (0 if not given).

    It copies row by row: copying slices is several times faster than scattering through a mask of the rectangle.
    """
    starts = [0] * len(at_N) if starts_N is None else starts_N.tolist()
    for row, at, length, start in zip(into_N_W, at_N.tolist(), lengths_N.tolist(), starts, strict=True):
        row[start : start + length] = flat[at : at + length]
    return into_N_W


def ones(starts_N: NDArray[np.signedinteger], lengths_N: NDArray[np.signedinteger], width: int) -> IndexArray:
    """1 where a row has a token."""
    mask_N_W = np.zeros((len(lengths_N), width), np.int64)
    for row, start, length in zip(mask_N_W, starts_N.tolist(), lengths_N.tolist(), strict=True):
        row[start : start + length] = 1
    return mask_N_W


def _positions(starts_N: IntArray, lengths_N: IntArray, width: int) -> IndexArray:
    counting = np.arange(width)
    positions_N_W = np.zeros((len(lengths_N), width), np.int64)
    for row, start, length in zip(positions_N_W, starts_N.tolist(), lengths_N.tolist(), strict=True):
        row[start : start + length] = counting[:length]
        row[start + length :] = max(length - 1, 0)
    return positions_N_W


def _on_last_token(rewards_S: NDArray[np.float64], responses_S: IntArray, width: int) -> FloatArray:
    rewards_S_R = np.zeros((len(rewards_S), width), np.float32)
    rows = np.flatnonzero(~np.isnan(rewards_S) & (responses_S > 0))
    rewards_S_R[rows, responses_S[rows] - 1] = rewards_S[rows]
    return rewards_S_R
