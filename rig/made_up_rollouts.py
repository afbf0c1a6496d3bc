"""Made-up rollouts to look at: any number of them, each the same every time it is asked for.

Every fourth prompt is a sum, answered in turns with a calculator; states, rewards and versions are spread so that every
filter finds something. Some texts and names hold what would be dangerous if a page took it for HTML.
"""

from collections.abc import Sequence

import numpy as np

from rig.chatml import render_chat
from rig.vocabulary import ADDED_IDS, encode
from stepwell.pool.api.watching import TrajectorySnapshot, TrajectoryState
from stepwell.steps.columns import Columns, pack
from stepwell.steps.step import Exactness, Step, VersionSpan, ids_array, logprobs_array

GROUP = 4
BEGAN = 1_790_000_000.0
VERSIONS = 12
SHARD = "data_pool"
DANGER = '<script>window.hacked = true</script><img src="x" onerror="window.hacked = true">'
STATES = (
    (TrajectoryState.OPEN, ""),
    (TrajectoryState.WAITING, "rollouts"),
    (TrajectoryState.READY, ""),
    (TrajectoryState.LEASED, ""),
    (TrajectoryState.TRAINED, ""),
    (TrajectoryState.TRAINED, ""),
    (TrajectoryState.DROPPED, "stale"),
    (TrajectoryState.DROPPED, "aborted"),
)
NOTES = {"stale": "5 versions behind", "aborted": ""}
SOURCES = ("", "sums", "riddles")
_NAMES = {token: name for name, token in ADDED_IDS.items()}


class RigTokenizer:
    """Reads the ids of the rig's vocabulary, special tokens included."""

    def __init__(self) -> None:
        self.missing: str | None = None
        """Say why there is none, to have none."""

    def start(self) -> None:
        pass

    def why_not_ready(self) -> str | None:
        return self.missing

    def decode(self, ids: Sequence[int]) -> str:
        parts = [_NAMES[token].encode() if token in _NAMES else bytes([token]) for token in ids]
        return b"".join(parts).decode(errors="replace")


def key_of(number: int) -> tuple[str, str]:
    """Some names are dangerous too."""
    named = "<script>hacked()</script>" if number % 100 == 13 else ""
    return f"t-{number:06d}{named}", f"p-{number // GROUP:05d}"


def number_of(trajectory_uid: str) -> int:
    return int(trajectory_uid[2:8])


def summary_of(number: int, began: float = BEGAN) -> TrajectorySnapshot:
    uid, prompt = key_of(number)
    group = number // GROUP
    state, cause = STATES[group % len(STATES)]
    luck = np.random.default_rng(number)
    oldest = group % VERSIONS
    exactness = (Exactness.ENGINE, Exactness.ENGINE, Exactness.SUBMITTED, Exactness.RETOKENIZED)[group % 7 % 4]
    turns = turns_of(number)
    return TrajectorySnapshot(
        trajectory_uid=uid,
        prompt_uid=prompt,
        channel="validation" if group % 10 == 9 else "train",
        source=SOURCES[group % len(SOURCES)],
        shard=SHARD,
        group=group,
        group_size=GROUP,
        state=state,
        cause=cause,
        steps=turns,
        tokens=turns * 150,
        response_tokens=turns * 40,
        reward=None if state is TrajectoryState.OPEN else round(float(luck.normal(0.5, 0.3)), 3),
        reward_source="" if state is TrajectoryState.OPEN else "sums",
        oldest_version=oldest,
        newest_version=oldest + (number % 2),
        exactness=exactness,
        marks=("odd",) if number % 50 == 7 else ("<b onclick=hacked()>",) if number % 200 == 11 else (),
        started_at=began + group,
        changed_at=began + group + 30,
        note=NOTES.get(cause, ""),
    )


def turns_of(number: int) -> int:
    return 1 + number % 3


def steps_of(number: int) -> list[Step]:
    """The conversation, one step a turn; each prompt goes on where the step before it ended."""
    uid, prompt = key_of(number)
    luck = np.random.default_rng(number)
    a, b = (number // GROUP) % 97 + 2, (number // GROUP) % 89 + 3
    said = f"How much is {a} plus {b}? {DANGER if number % 20 == 3 else ''}"
    messages: list[dict[str, str]] = [
        {"role": "system", "content": "You add numbers. 你好, ça va? 🙂"},
        {"role": "user", "content": said},
    ]
    version, steps = (number // GROUP) % VERSIONS, []
    for turn in range(turns_of(number)):
        last = turn == turns_of(number) - 1
        answer = f"The sum is {a + b} 🙂 ({luck.integers(1000)})." if last else f"<tool_call>{a}+{b}</tool_call>"
        response = encode(answer + "<|im_end|>")
        half = len(response) // 2
        steps.append(
            Step(
                prompt_ids=ids_array(encode(render_chat(messages))),
                response_ids=ids_array(response),
                response_logprobs=logprobs_array(-luck.exponential(0.7, len(response))),
                response_mask=np.arange(len(response)) % 11 != 10,
                trajectory_uid=uid,
                prompt_uid=prompt,
                step_index=turn,
                policy_version=version,
                version_spans=(VersionSpan(version, 0, half), VersionSpan(version + number % 2, half, len(response))),
                exactness=Exactness.ENGINE,
                finish_reason="stop" if last else "tool_calls",
                sampling={"temperature": 1.0},
                metadata={"question": said, "number": number},
                uid=f"{uid}-{turn}",
                started_at=BEGAN + number // GROUP + turn,
                untrainable="greedy: sampled at temperature 0" if number % 31 == 5 and turn == 0 else None,
            )
        )
        messages += [{"role": "assistant", "content": answer}, {"role": "tool", "content": str(a + b)}]
    return steps


def columns_of(numbers: list[int]) -> Columns:
    return pack([step for number in numbers for step in steps_of(number)])
