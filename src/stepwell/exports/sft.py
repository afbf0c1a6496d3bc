"""The shape `sft`: examples for supervised fine-tuning, one row per step.

`labels` are the ids of trained response tokens and -100 elsewhere, so that a row can be trained as it is. A row is a
step and not a conversation, because a chat template may rewrite earlier turns: so every response stands after its own
prompt.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from stepwell.common.tokenizers import Decode
from stepwell.exports.shapes import table_of, task_steps
from stepwell.steps.columns import Columns
from stepwell.steps.groups import StepGroup
from stepwell.steps.json_lines import Record
from stepwell.steps.returns import return_of
from stepwell.steps.step import IntArray, Step

if TYPE_CHECKING:
    import pyarrow

IGNORED = -100
"""The label by which every trainer knows a token that is not trained."""


class SftShape:
    def __init__(self, decode: Decode | None, best: int | None) -> None:
        """Keeps, if `best` is given, only this number of trajectories of each group: those with the highest rewards."""
        self._decode, self._best = decode, best

    def records(self, groups: Sequence[StepGroup]) -> Iterator[Record]:
        for group in groups:
            for columns in self._best_of(group):
                steps = task_steps(columns)
                reward = return_of(steps)
                for step in steps:
                    yield self._record(step, group, reward)

    def table(self, groups: Sequence[StepGroup]) -> "pyarrow.Table":
        import pyarrow as pa

        texts = {} if self._decode is None else {"prompt": pa.string(), "completion": pa.string()}
        types: dict[str, Any] = {
            **texts,
            "input_ids": pa.list_(pa.int32()),
            "labels": pa.list_(pa.int32()),
            "reward": pa.float64(),
            "trajectory_uid": pa.string(),
            "prompt_uid": pa.string(),
            "step_index": pa.int32(),
            "policy_version": pa.int64(),
            "channel": pa.string(),
            "source": pa.string(),
        }
        return table_of(self.records(groups), types)

    def _best_of(self, group: StepGroup) -> list[Columns]:
        trajectories = group.trajectories()
        if self._best is None:
            return trajectories
        rewards = [(return_of(task_steps(columns)), columns) for columns in trajectories]
        scored = [(reward, columns) for reward, columns in rewards if reward is not None]
        return [columns for _, columns in sorted(scored, key=lambda pair: -pair[0])[: self._best]]

    def _record(self, step: Step, group: StepGroup, reward: float | None) -> Record:
        decode = self._decode
        texts = {}
        if decode is not None:
            texts = {"prompt": decode(step.prompt_ids.tolist()), "completion": decode(step.response_ids.tolist())}
        return {
            **texts,
            "input_ids": np.concatenate([step.prompt_ids, step.response_ids]),
            "labels": np.concatenate([np.full(len(step.prompt_ids), IGNORED, np.int32), _labels(step)]),
            "reward": reward,
            "trajectory_uid": step.trajectory_uid,
            "prompt_uid": step.prompt_uid,
            "step_index": step.step_index,
            "policy_version": step.policy_version,
            "channel": group.channel,
            "source": group.source,
        }


def _labels(step: Step) -> IntArray:
    if step.response_mask is None:
        return step.response_ids
    return np.where(step.response_mask, step.response_ids, np.int32(IGNORED))
