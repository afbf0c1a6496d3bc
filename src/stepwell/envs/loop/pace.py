"""When to start groups, evaluate, write a checkpoint and end: pure rules without clock, network or tasks.

- Nothing here ends a group that is in progress. To pause means to start no more.
- Waiting groups and groups in progress together stay within the off-policy limit, if no other environment fills the
  queue.
"""

import math
from dataclasses import dataclass

from stepwell.envs.config import BaseEnvConfig, EvalHandling
from stepwell.wire.scored_groups import EnvStatus


@dataclass(frozen=True, slots=True)
class PaceTerms:
    """The terms that do not change during a run; those that are not set in the configuration come from the rollout
    server."""

    config: BaseEnvConfig
    batch_size: int
    max_workers: int
    total_steps: int
    checkpoint_interval: int
    """0 or less: never."""


def max_workers(config: BaseEnvConfig, servers: int) -> int:
    """Concurrent groups."""
    if config.max_num_workers == -1:
        return config.max_num_workers_per_node * max(1, servers)
    return config.max_num_workers


@dataclass(frozen=True, slots=True)
class Situation:
    status: EnvStatus
    """The last status from the rollout server."""
    running: int
    """Groups in progress, also those that are being sent."""
    evaluated_at: int
    """Step of the last evaluation, or of the start."""
    checkpointed_at: int
    """Step of the last checkpoint, or of the start."""
    is_evaluating: bool = False
    is_stopping: bool = False
    has_ended: bool = False
    """Whether there will be no more items."""
    is_pausing: bool = False
    """A group failed a moment ago, so the next one must wait."""


@dataclass(frozen=True, slots=True)
class Decision:
    start: int = 0
    """Groups to start now."""
    idle: str = ""
    """Why no more groups are started; empty while some are started or the most are running."""
    evaluate: bool = False
    checkpoint: int | None = None
    """The step to write a checkpoint for."""
    finished: str = ""
    """Why the run is over; empty while it is not. Groups in progress may still finish."""


def decide(terms: PaceTerms, now: Situation) -> Decision:
    checkpoint = _checkpoint(terms, now)
    finished = _finished(terms, now)
    if finished:
        return Decision(checkpoint=checkpoint, finished=finished)
    evaluate = _must_evaluate(terms, now)
    most, why = _most_running(terms, now, is_evaluating=now.is_evaluating or evaluate)
    start = max(0, most - now.running)
    return Decision(start=start, idle="" if start else why, evaluate=evaluate, checkpoint=checkpoint)


def offpolicy_room(terms: PaceTerms, now: Situation) -> int | None:
    """How many groups may be in progress within the off-policy limit; None if there is no limit."""
    if terms.config.max_batches_offpolicy == 0:
        return None
    own_share = terms.config.min_batch_allocation or 0.0
    open_share = min(1.0, now.status.unallocated_fraction + own_share)
    ahead = terms.config.max_batches_offpolicy * terms.batch_size
    room = max(1, int(ahead * open_share) // terms.config.group_size) - now.status.queue_size
    own_room = math.ceil(ahead * own_share / terms.config.group_size) - now.status.self_queue_size
    return max(0, room, own_room)


def _most_running(terms: PaceTerms, now: Situation, *, is_evaluating: bool) -> tuple[int, str]:
    """How many groups may be in progress now, and what limits them."""
    if now.is_pausing:
        return 0, "a group failed a moment ago"
    most, why = terms.max_workers, ""
    if is_evaluating and terms.config.eval_handling is EvalHandling.STOP_TRAIN:
        return 0, "evaluating"
    if is_evaluating and terms.config.eval_handling is EvalHandling.LIMIT_TRAIN:
        most, why = int(most * terms.config.eval_limit_ratio), "evaluating"
    room = offpolicy_room(terms, now)
    if room is not None and room < most:
        most, why = room, "enough waits for the trainer"
    return most, why


def _finished(terms: PaceTerms, now: Situation) -> str:
    if now.is_stopping:
        return "told to stop"
    if now.status.current_step >= terms.total_steps:
        return f"the trainer is at step {now.status.current_step} of {terms.total_steps}"
    if now.has_ended and not now.running:
        return "there are no more items"
    return ""


def _must_evaluate(terms: PaceTerms, now: Situation) -> bool:
    if now.is_evaluating or terms.config.steps_per_eval == 0:
        return False
    return now.status.current_step // terms.config.steps_per_eval > now.evaluated_at // terms.config.steps_per_eval


def _checkpoint(terms: PaceTerms, now: Situation) -> int | None:
    if terms.checkpoint_interval <= 0:
        return None
    due = now.status.current_step // terms.checkpoint_interval * terms.checkpoint_interval
    return due if due > now.checkpointed_at else None
