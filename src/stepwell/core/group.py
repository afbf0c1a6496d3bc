"""Trajectories and the groups they gather in: what the pool holds until a trainer takes it."""

from dataclasses import dataclass, field, replace

import numpy as np

from stepwell.core.step import INDEX_BY_POOL, IntArray, JsonObject, Step

NO_IDS: IntArray = np.empty(0, np.int32)


@dataclass(slots=True, eq=False)
class Trajectory:
    uid: str
    group: "Group"
    metadata: JsonObject
    steps: dict[str, Step] = field(default_factory=dict)
    """By identity. Quarantined ones stand here too, stripped of their tokens, so that they keep their place."""
    completed: bool = False
    reward: float | None = None
    """The reward of the whole rollout, if whoever completed it gave one."""

    def can_follow(self, step: Step) -> bool:
        """All steps of a trajectory are indexed by their producer, or all by the pool."""
        first = next(iter(self.steps.values()), step)
        return (first.step_index == INDEX_BY_POOL) == (step.step_index == INDEX_BY_POOL)

    def sound_steps(self) -> list[Step]:
        return [step for step in self.steps.values() if step.quarantine is None]

    def shipped(self) -> list[Step]:
        """The steps as a trainer gets them: in order, indexed, the last one marked and carrying the reward."""
        ordered = sorted(self.steps.values(), key=lambda step: (step.step_index, step.started_at))
        sound = [
            replace(
                step,
                step_index=place if step.step_index == INDEX_BY_POOL else step.step_index,
                is_last=False,
                metadata={**self.metadata, **step.metadata},
            )
            for place, step in enumerate(ordered)
            if step.quarantine is None
        ]
        last = sound[-1]
        sound[-1] = replace(last, is_last=True, reward=self.reward if last.reward is None else last.reward)
        return sound


@dataclass(slots=True, eq=False)
class Group:
    """Rollouts of one prompt that are trained together. Ready once `size` of them are complete."""

    seq: int
    """Order of opening in the pool; smaller is older."""
    prompt_uid: str
    channel: str
    size: int
    trajectories: dict[str, Trajectory] = field(default_factory=dict)
    completed: int = 0

    def can_join(self) -> bool:
        return len(self.trajectories) < self.size

    def is_ready(self) -> bool:
        return self.completed == self.size

    def sound_steps(self) -> list[Step]:
        return [step for trajectory in self.trajectories.values() for step in trajectory.sound_steps()]

    def shipped(self) -> list[Step]:
        return [step for trajectory in self.trajectories.values() for step in trajectory.shipped()]


def stripped(step: Step) -> Step:
    """The step without its arrays: it marks a place and costs nothing."""
    return replace(step, prompt_ids=NO_IDS, response_ids=NO_IDS, response_logprobs=None, response_mask=None)
