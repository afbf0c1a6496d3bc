"""Pairs to prefer by: two trajectories of a group, the better one as `chosen`, the other as `rejected`.

What always holds: both answer the very same prompt, token for token, and their rewards differ by the margin at least; a
trajectory is in one pair at most. The best is paired with the worst, the second best with the second worst, and so on.
What follows the prompt is the whole rest of the conversation, with what tools and users said in it. A trajectory whose
last step does not continue its first prompt (its agent compacted what was before) is passed over.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from stepwell.common.tokenizers import Decode
from stepwell.exports.formats import return_of, table_of, task_steps
from stepwell.steps.columns import Columns
from stepwell.steps.groups import StepGroup
from stepwell.steps.json_lines import Record
from stepwell.steps.step import IntArray

if TYPE_CHECKING:
    import pyarrow


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """A trajectory as one answer to its first prompt."""

    trajectory_uid: str
    prompt: IntArray
    rest: IntArray
    earned: float


class Preferences:
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

    def _record(self, chosen: Answer, rejected: Answer, group: StepGroup) -> Record:
        ids = {"prompt": chosen.prompt, "chosen": chosen.rest, "rejected": rejected.rest}
        decode = self._decode
        texts = {} if decode is None else {side: decode(found.tolist()) for side, found in ids.items()}
        return {
            **texts,
            **{f"{side}_ids": found for side, found in ids.items()},
            "chosen_reward": chosen.earned,
            "rejected_reward": rejected.earned,
            "prompt_uid": group.columns.prompt_uids[0],
            "chosen_uid": chosen.trajectory_uid,
            "rejected_uid": rejected.trajectory_uid,
            "channel": group.channel,
            "source": group.source,
        }


def answers_of(group: StepGroup) -> list[Answer]:
    return [answer for columns in group.trajectories() if (answer := _answer(columns)) is not None]


def pairs(answers: Sequence[Answer], margin: float) -> Iterator[tuple[Answer, Answer]]:
    """Of those with the same prompt."""

    def prompt(answer: Answer) -> bytes:
        return answer.prompt.tobytes()

    for _, alike in groupby(sorted(answers, key=prompt), key=prompt):
        ranked = sorted(alike, key=lambda answer: -answer.earned)
        for better, worse in zip(ranked[: len(ranked) // 2], reversed(ranked), strict=False):
            if better.earned > worse.earned and better.earned - worse.earned >= margin:
                yield better, worse


def _answer(columns: Columns) -> Answer | None:
    steps = task_steps(columns)
    earned = return_of(steps)
    if earned is None:
        return None
    prompt, last = steps[0].prompt_ids, steps[-1]
    whole = np.concatenate([last.prompt_ids, last.response_ids])
    if not np.array_equal(whole[: len(prompt)], prompt):
        return None
    return Answer(steps[0].trajectory_uid, prompt, whole[len(prompt) :], earned)
