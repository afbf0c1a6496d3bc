"""A stored trajectory with the rewards of another function.

What always holds: no reward of the old function is left; a failure leaves no reward at all, and the metadata says why;
what is given is the next revision; every other column stays as it is.
"""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from stepwell.pool.api.scoring import Score
from stepwell.rewards.attempt import Attempt
from stepwell.steps.parquet import StoredTrajectory
from stepwell.steps.step import Json, JsonObject, Step

if TYPE_CHECKING:
    import pyarrow

EXPLAINED = "reward"
"""Where a trajectory's metadata says more of its reward."""


def rescored(stored: StoredTrajectory, attempt: Attempt, source: str) -> "pyarrow.Table":
    steps = stored.steps
    rewards = step_rewards(steps, attempt.score)
    revision = 1 + max(step.reward_revision for step in steps)
    concerned = [new is not None or step.reward_revision > 0 for new, step in zip(rewards, steps, strict=True)]
    words = _explanation(attempt)
    return _with_columns(
        stored.table,
        reward=rewards,
        reward_source=[source if touched else "" for touched in concerned],
        reward_revision=[revision if touched else 0 for touched in concerned],
        metadata=[json.dumps(_explained(step.metadata, words)) for step in steps],
    )


def step_rewards(steps: Sequence[Step], score: Score | None) -> list[float | None]:
    """As the pool hands them out: the rollout's stands on its last step that is not marked, unless that has its own."""
    if score is None:
        return [None] * len(steps)
    rewards = list(score.step_rewards) or [None] * len(steps)
    unmarked = [place for place, step in enumerate(steps) if step.untrainable is None]
    carrier = unmarked[-1] if unmarked else len(steps) - 1
    if rewards[carrier] is None:
        rewards[carrier] = score.rest
    return rewards


def _explanation(attempt: Attempt) -> dict[str, Json]:
    if attempt.score is None:
        return {"outcome": attempt.outcome, "why": attempt.why}
    said: dict[str, Json] = {"parts": dict(attempt.score.parts), "notes": attempt.score.notes}
    return {name: value for name, value in said.items() if value}


def _explained(metadata: JsonObject, words: dict[str, Json]) -> dict[str, Json]:
    kept = {name: value for name, value in metadata.items() if name != EXPLAINED}
    return {**kept, EXPLAINED: words} if words else kept


def _with_columns(table: "pyarrow.Table", **columns: Sequence[object]) -> "pyarrow.Table":
    import pyarrow

    for name, values in columns.items():
        place = table.schema.get_field_index(name)
        field = table.schema.field(place)
        table = table.set_column(place, field, pyarrow.array(values, field.type))
    return table
