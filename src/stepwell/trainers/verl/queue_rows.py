"""Rows of a batch with the names and the cut that verl's V1 trainer has for them.

- A key is GROUP_ROLLOUT_ROW; verl splits it at `_`, so a group's name has none.
- A row's response begins at its first trained token. Tokens in it that are not trained have the mask 0.
- Each row of a rollout has the rollout's return on its last token, and its tokens have the advantages of the reference
  trainer: they do not depend on how the rollout was cut into rows.
"""

from dataclasses import dataclass
from uuid import uuid4

import numpy as np

from stepwell.steps.layout import IndexArray
from stepwell.steps.step import FloatArray
from stepwell.trainers.rows import TrainedRows


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class QueueRow:
    group: str
    rollout: int
    """The number of the rollout in the group."""
    number: int
    """The number of the row among the rows of the rollout."""
    ids: IndexArray
    prompt: int
    """How many of the ids are the prompt; the arrays below are as long as the rest."""
    mask: IndexArray
    logprobs: FloatArray
    """NaN where one is missing."""
    advantages: FloatArray
    reward: float
    oldest: int
    """The oldest of the policy versions that wrote the trained tokens."""
    newest: int
    turns: int
    """Calls of the agent."""

    @property
    def key(self) -> str:
        return f"{self.group}_{self.rollout}_{self.number}"


def queue_rows(rows: TrainedRows, max_tokens: int | None = None) -> tuple[list[QueueRow], int]:
    """The trained rows in the order of the batch, and how many were left out because they are longer than
    `max_tokens`."""
    merged = rows.merged
    turns_R = np.bincount(merged.row_of_S, minlength=len(merged))
    names: dict[int, str] = {}
    numbers: dict[int, int] = {}
    found: list[QueueRow] = []
    too_long = 0
    for row in np.sort(rows.chosen_R).tolist():
        here = slice(int(merged.offsets_R[row]), int(merged.offsets_R[row + 1]))
        if max_tokens is not None and here.stop - here.start > max_tokens:
            too_long += 1
            continue
        trajectory, group = int(merged.trajectory_of_R[row]), int(merged.group_of_R[row])
        trained = rows.trained[here]
        prompt = int(np.flatnonzero(trained)[0])
        versions = merged.versions[here][trained]
        number = numbers[trajectory] = numbers.get(trajectory, -1) + 1
        response = slice(here.start + prompt, here.stop)
        found.append(
            QueueRow(
                group=names.setdefault(group, uuid4().hex),
                rollout=trajectory,
                number=number,
                ids=merged.tokens[here].astype(np.int64),
                prompt=prompt,
                mask=trained[prompt:].astype(np.int64),
                logprobs=np.where(trained[prompt:], merged.logprobs[response], np.float32(0.0)),
                advantages=np.where(trained[prompt:], rows.advantages[response], np.float32(0.0)),
                reward=float(np.nan_to_num(merged.rewards_R[row])),
                oldest=int(versions.min()),
                newest=int(versions.max()),
                turns=int(turns_R[row]),
            )
        )
    return found, too_long
