"""The shape `preferences`: pairs of trajectories of a group, the better one as `chosen`, the other as `rejected`.

Invariants:
- Both answer the same prompt, token for token. Their rewards differ by the margin at least.
- A trajectory is in at most one pair: the best with the worst, the second best with the second worst, and so on.
- The answer is everything after the first prompt, with the messages of tools and users. A trajectory whose last step
  does not continue its first prompt, because its agent compacted the conversation, is left out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from stepwell.common.tokenizers import Decode
from stepwell.exports.shapes import table_of, task_steps
from stepwell.steps.columns import Columns
from stepwell.steps.groups import StepGroup
from stepwell.steps.json_lines import Record
from stepwell.steps.returns import return_of
from stepwell.steps.step import IntArray

if TYPE_CHECKING:
    import pyarrow


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
