"""What a lane of the outbox knows of its shard, and of steps that the shard does not take."""

import asyncio
from dataclasses import replace

from stepwell.errors import Conflict, PoolUnavailable, StepwellError, UnknownTrajectory
from stepwell.pool.api.producing import SubmitVerdict
from stepwell.steps.columns import pack
from stepwell.steps.step import Step
from stepwell.wire.openai import NO_IDS

MAX_REASON = 500
"""Characters of the reason of a quarantine."""
MOST_REFUSALS = 3
"""How often a shard may fail over a step while it takes others."""
MOST_FAILURES = 8
"""Single steps over which a shard fails one after the other before it counts as the one at fault."""
UNSENDABLE = "unsendable"
"""The kind of quarantine, and of loss, for a step that cannot be packed, or over which its shard fails."""


class LaneSender:
    """What is known of one lane besides its steps."""

    def __init__(self) -> None:
        self.arrived = asyncio.Event()
        """There is something to take."""
        self.hurried = asyncio.Event()
        """Somebody waits: send without gathering."""
        self.taken = 0
        """Messages that the shard has taken."""
        self.failed = 0
        """Single steps of the present message over which the shard failed, one after the other."""
        self.refusals: dict[Step, tuple[int, int]] = {}
        """Steps over which the shard failed: how often, and the number of messages that it had taken until then."""
        self.is_resuming = False
        """Postponed steps are about to be tried again."""


def refusal_of(step: Step, verdict: SubmitVerdict | None) -> StepwellError:
    if verdict is None:
        return PoolUnavailable("this call was given up: too many steps wait for the pool")
    if verdict is SubmitVerdict.UNKNOWN:
        return UnknownTrajectory(f"the pool has no trajectory {step.trajectory_uid} of prompt_uid {step.prompt_uid}")
    return Conflict(f"trajectory {step.trajectory_uid}: the pool refused this call's step as {verdict}")


def can_be_packed(step: Step) -> bool:
    try:
        pack([step])
    except Exception:  # noqa: BLE001 - a step may hold anything
        return False
    return True


def without_content(step: Step, why: str) -> Step:
    """A step that only keeps its place in its trajectory. Nothing of it can be at fault."""
    return replace(
        step,
        prompt_ids=NO_IDS,
        response_ids=NO_IDS,
        response_logprobs=None,
        response_mask=None,
        version_spans=(),
        metadata={},
        sampling={},
        extras={},
        temperature=None,
        quarantine=why,
    )
