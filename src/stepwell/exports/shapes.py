"""The shapes of a row of an export, as a table and as JSON lines: `steps`, `sft` and `preferences`.

- Token ids are the sampled ones in every shape. Texts are decoded from them, with the markers of the chat template, and
  only if there is a tokenizer.
- Side calls of an agent, and answers that nobody read, are no examples of its task.
- A row of `sft` is a step and not a conversation, because a chat template may rewrite earlier turns: so every response
  stands after its own prompt. `labels` are the ids of trained response tokens and -100 elsewhere, so that a row can be
  trained as it is.
- A row of `preferences` is a pair of trajectories of a group, the better one as `chosen`, the other as `rejected`. Both
  answer the same prompt, token for token. Their rewards differ by the margin at least. A trajectory is in at most one
  pair: the best with the worst, the second best with the second worst, and so on.
- The answer of a pair is everything after the first prompt, with the messages of tools and users. A trajectory whose
  last step does not continue its first prompt, because its agent compacted the conversation, is left out.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from stepwell.common.tokenizers import Decode
from stepwell.steps.arrow import step_groups_to_arrow
from stepwell.steps.columns import Columns, unpack
from stepwell.steps.groups import StepGroup
from stepwell.steps.json_lines import Record, step_records
from stepwell.steps.returns import return_of
from stepwell.steps.step import IntArray, Step
from stepwell.steps.trainable import ASIDE, fault_kind

if TYPE_CHECKING:
    import pyarrow
if TYPE_CHECKING:
    import pyarrow
if TYPE_CHECKING:
    import pyarrow

IGNORED = -100
"""The label by which every trainer knows a token that is not trained."""


class ExportShape(Protocol):
    """One of the two is called, once for each page of groups, in order."""

    def table(self, groups: Sequence[StepGroup]) -> "pyarrow.Table": ...

    def records(self, groups: Sequence[StepGroup]) -> Iterator[Record]: ...


class StepsShape:
    """All columns of a step. The only shape that can be imported."""

    def __init__(self) -> None:
        self._groups = 0

    def table(self, groups: Sequence[StepGroup]) -> "pyarrow.Table":
        first, self._groups = self._groups, self._groups + len(groups)
        return step_groups_to_arrow(groups, first)

    def records(self, groups: Sequence[StepGroup]) -> Iterator[Record]:
        for group in groups:
            yield from step_records(group, self._groups)
            self._groups += 1


def task_steps(columns: Columns) -> list[Step]:
    """The steps of a trajectory without those that are aside."""
    steps = unpack(columns, copy=False)
    return [step for step in steps if fault_kind(step.untrainable or "") not in ASIDE]


def table_of(records: Iterable[Record], types: "dict[str, pyarrow.DataType]") -> "pyarrow.Table":
    import pyarrow as pa

    return pa.Table.from_pylist(list(records), pa.schema(types))


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


@dataclass(frozen=True, slots=True, eq=False)
class RankedAnswer:
    """A trajectory as one answer to its first prompt."""

    trajectory_uid: str
    prompt: IntArray
    rest: IntArray
    reward: float


class PreferenceShape:
    def __init__(self, decode: Decode | None, margin: float) -> None:
        self._decode, self._margin = decode, margin

    def records(self, groups: Sequence[StepGroup]) -> Iterator[Record]:
        for group in groups:
            for chosen, rejected in pairs(answers_of(group), self._margin):
                yield self._record(chosen, rejected, group)

    def table(self, groups: Sequence[StepGroup]) -> "pyarrow.Table":
        import pyarrow as pa

        sides = ("prompt", "chosen", "rejected")
        types: dict[str, Any] = {} if self._decode is None else dict.fromkeys(sides, pa.string())
        types |= {f"{side}_ids": pa.list_(pa.int32()) for side in sides}
        types |= {"chosen_reward": pa.float64(), "rejected_reward": pa.float64()}
        types |= {"prompt_uid": pa.string(), "chosen_uid": pa.string(), "rejected_uid": pa.string()}
        types |= {"channel": pa.string(), "source": pa.string()}
        return table_of(self.records(groups), types)

    def _record(self, chosen: RankedAnswer, rejected: RankedAnswer, group: StepGroup) -> Record:
        ids = {"prompt": chosen.prompt, "chosen": chosen.rest, "rejected": rejected.rest}
        decode = self._decode
        texts = {} if decode is None else {side: decode(found.tolist()) for side, found in ids.items()}
        return {
            **texts,
            **{f"{side}_ids": found for side, found in ids.items()},
            "chosen_reward": chosen.reward,
            "rejected_reward": rejected.reward,
            "prompt_uid": group.columns.prompt_uids[0],
            "chosen_uid": chosen.trajectory_uid,
            "rejected_uid": rejected.trajectory_uid,
            "channel": group.channel,
            "source": group.source,
        }


def answers_of(group: StepGroup) -> list[RankedAnswer]:
    return [answer for columns in group.trajectories() if (answer := _answer(columns)) is not None]


def pairs(answers: Sequence[RankedAnswer], margin: float) -> Iterator[tuple[RankedAnswer, RankedAnswer]]:
    """Pairs among the answers to the same prompt."""

    def prompt(answer: RankedAnswer) -> bytes:
        return answer.prompt.tobytes()

    for _, same_prompt in groupby(sorted(answers, key=prompt), key=prompt):
        ranked = sorted(same_prompt, key=lambda answer: -answer.reward)
        for better, worse in zip(ranked[: len(ranked) // 2], reversed(ranked), strict=False):
            if better.reward > worse.reward and better.reward - worse.reward >= margin:
                yield better, worse


def _answer(columns: Columns) -> RankedAnswer | None:
    steps = task_steps(columns)
    reward = return_of(steps)
    if reward is None:
        return None
    prompt, last = steps[0].prompt_ids, steps[-1]
    whole = np.concatenate([last.prompt_ids, last.response_ids])
    if not np.array_equal(whole[: len(prompt)], prompt):
        return None
    return RankedAnswer(steps[0].trajectory_uid, prompt, whole[len(prompt) :], reward)
