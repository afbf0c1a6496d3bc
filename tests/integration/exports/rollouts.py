"""Groups of every kind that a pool may hold, made up from a seed."""

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np

from stepwell.pool.api.producing import Registration, RewardGiven
from stepwell.pool.client import PoolClient
from stepwell.steps.step import INDEX_BY_POOL, Exactness, Json, Step, VersionSpan, ids_array, logprobs_array

WORDS = ("plain", "Ünïcödé ✓", "日本語", 'quotes " and \\', "line\nbreak", "")
MARKS = (None, None, "greedy: temperature 0", "side_call: a title")


class Maker:
    def __init__(self, seed: int) -> None:
        self._luck = np.random.default_rng(seed)

    def group(self, number: int) -> tuple[list[Registration], list[list[Step]]]:
        luck = self._luck
        prompt_uid = f"prompt-{number}-{luck.choice(WORDS)}"
        size = int(luck.integers(1, 5))
        channel = "validation" if luck.random() < 0.1 else "train"
        source = str(luck.choice(("", "maths", "spiel-größe")))
        uids = [f"t-{luck.integers(0, 2**60):x}" for _ in range(size)]
        registered = [Registration(uid, prompt_uid, channel, size, self._object(), source) for uid in uids]
        return registered, [list(self._trajectory(uid, prompt_uid)) for uid in uids]

    def reward(self) -> float | None:
        return None if self._luck.random() < 0.2 else float(self._luck.normal())

    def some(self, share: float) -> bool:
        return bool(self._luck.random() < share)

    def _trajectory(self, uid: str, prompt_uid: str) -> Iterator[Step]:
        """Numbered by the pool or by its producer; mostly each turn goes on from the last, sometimes one forks."""
        luck = self._luck
        by_pool = self.some(0.5)
        context = luck.integers(0, 150_000, luck.integers(1, 80), dtype=np.int32)
        for turn in range(int(luck.integers(1, 6))):
            if self.some(0.15):
                context = context[: luck.integers(1, len(context) + 1)]
            prompt = np.concatenate([context, luck.integers(0, 150_000, luck.integers(1, 20), dtype=np.int32)])
            response = luck.integers(0, 150_000, luck.integers(1, 30), dtype=np.int32)
            yield Step(
                prompt_ids=ids_array(prompt),
                response_ids=ids_array(response),
                trajectory_uid=uid,
                prompt_uid=prompt_uid,
                uid=f"{uid}/{turn}" if by_pool or self.some(0.5) else "",
                step_index=INDEX_BY_POOL if by_pool else turn,
                **self._details(len(response), 1.7e9 + turn),
            )
            context = np.concatenate([prompt, response])

    def _details(self, length: int, started_at: float) -> dict[str, Any]:
        luck = self._luck
        cut = int(luck.integers(0, length))
        version = int(luck.integers(0, 9))
        spans = (VersionSpan(version, 0, cut), VersionSpan(version + 1, cut, length))
        reward = self.reward() if self.some(0.2) else None
        logprobs = logprobs_array(-luck.exponential(2.0, length))
        return {
            "response_logprobs": None if self.some(0.2) else logprobs,
            "response_mask": luck.random(length) < 0.5 if self.some(0.3) else None,
            "version_spans": spans if self.some(0.3) else (),
            "policy_version": version,
            "reward": reward,
            "reward_source": "" if reward is None else "environment",
            "reward_revision": 0 if reward is None else int(luck.integers(1, 4)),
            "exactness": Exactness(str(luck.choice(list(Exactness)))),
            "finish_reason": None if self.some(0.2) else str(luck.choice(("stop", "length", "tool_calls"))),
            "untrainable": MARKS[int(luck.integers(0, len(MARKS)))],
            "quarantine": "cut_short: no end" if self.some(0.03) else None,
            "started_at": started_at + float(luck.random()),
            "metadata": self._object(),
            "sampling": {"temperature": float(luck.random()), "top_k": -1},
            "extras": self._object(),
        }

    def _object(self) -> dict[str, Json]:
        luck = self._luck
        values: list[Json] = [None, True, 1, 1.0, 0.1, "text", "✓", [1, "two", None], {"a": {"b": []}}]
        names = luck.permutation(["answer", "dataset", "größe", "turn", "marks"])[: luck.integers(0, 4)]
        return {
            str(name): ["good"] if name == "marks" else values[int(luck.integers(0, len(values)))] for name in names
        }


async def fill(pool: PoolClient, steps: int, seed: int = 0, *, completed: float = 0.9) -> None:
    """Until it holds so many: complete or still open, with rewards of rollouts and of steps, revised and not."""
    maker, held, number = Maker(seed), 0, 0
    while held < steps:
        registered, trajectories = maker.group(number)
        number += 1
        held += sum(map(len, trajectories))
        await pool.submit_groups([step for found in trajectories for step in found], registered)
        await asyncio.gather(*(_end(pool, maker, trajectory, completed) for trajectory in registered))


async def _end(pool: PoolClient, maker: Maker, trajectory: Registration, completed: float) -> None:
    reward = maker.reward()
    is_judged, is_completed = reward is not None and maker.some(0.3), maker.some(completed)
    if reward is not None and is_judged:
        given = RewardGiven(
            trajectory_uid=trajectory.trajectory_uid,
            prompt_uid=trajectory.prompt_uid,
            value=reward,
            source="judge ✓",
            notes="so be it",
        )
        await pool.give_reward(given)
        await pool.give_reward(given)
        reward = None
    if is_completed:
        await pool.complete_trajectory(trajectory.trajectory_uid, trajectory.prompt_uid, reward)
