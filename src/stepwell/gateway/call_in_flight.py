"""A model call as it was requested, a call in flight, and how calls fail."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stepwell.gateway.bridge.bridge import PromptPlan
from stepwell.gateway.calls import NO_TRAJECTORY, CallPlace
from stepwell.gateway.dialects.dialect import Dialect, ModelCall, StreamWriter
from stepwell.gateway.error_responses import ErrorDetails, openai_error
from stepwell.gateway.recording.step_builder import PendingStep
from stepwell.gateway.requests import NO_URL, CallHeaders, CallUrl
from stepwell.gateway.response_writer import ResponseWriter, Sighting
from stepwell.pool.api.producing import CallBegun, TrajectoryRef
from stepwell.steps.step import Step


class RequestedCall(NamedTuple):
    """A model call that a client asks for, as its path tells."""

    ref: TrajectoryRef
    """NO_TRAJECTORY if the path names none."""
    dialect: Dialect
    url: CallUrl = NO_URL
    is_whitebox: bool = False
    """Whether the call is below /unrecorded."""
    route: str = ""
    """The path, with the dialect's template at its end."""

    @property
    def names_no_trajectory(self) -> bool:
        """Whether the call belongs to a session of its caller, or its header names the trajectory."""
        return self.ref == NO_TRAJECTORY and not self.is_whitebox


@dataclass(slots=True, eq=False)
class CallInFlight:
    """A call that an engine is asked to answer."""

    kind: str
    """The label of the call in metrics and traces."""
    placed: CallPlace
    call: ModelCall
    pending: PendingStep
    """The facts of the call's steps that are known before its answer."""
    writer: ResponseWriter
    headers: CallHeaders
    stream: StreamWriter
    sighting: Sighting
    key: str = ""
    """The `key` of its CallBegun."""
    is_whitebox: bool = False
    """Whether this is a call below /unrecorded, whose client keeps its tokens itself."""
    is_abandoned: bool = False
    """The client left, and no other client waits for the answer."""
    is_over: bool = False
    engine: str = ""
    """The address of the engine that answered."""
    prompt_tokens: int = 0
    response_tokens: int = 0
    plan: PromptPlan | None = None
    """The plan by which the call's prompt is made; None without a bridge."""

    @property
    def is_recorded(self) -> bool:
        return self.pending.trajectory_uid != ""

    def announcement(self, uid: str = "") -> CallBegun:
        """The call itself, or that it is given the answer of the call with this uid."""
        step = self.pending
        return CallBegun(
            step.trajectory_uid,
            step.prompt_uid,
            uid or step.uid,
            key=self.key,
            repeats=self.headers.repeats,
            began_at=step.started_at,
        )

    def attributes(self) -> dict[str, str | int]:
        """Attributes for the trace."""
        return {
            "trajectory_uid": self.pending.trajectory_uid,
            "prompt_uid": self.pending.prompt_uid,
            "engine": self.engine,
            "status": self.writer.status,
            "prompt_tokens": self.prompt_tokens,
            "response_tokens": self.response_tokens,
        }

    def count(self, steps: Sequence[Step]) -> None:
        self.prompt_tokens = sum(len(step.prompt_ids) for step in steps[:: self.call.choices_per_prompt])
        self.response_tokens = sum(len(step.response_ids) for step in steps)

    async def fail(self, error: ErrorDetails) -> None:
        self.is_over = True
        await send_error(self.writer, self.call.dialect, error, self.stream)


async def send_error(
    writer: ResponseWriter, dialect: Dialect | None, error: ErrorDetails, stream: StreamWriter | None = None
) -> None:
    """Send an HTTP error; an error event if a stream has begun; nothing if the response has ended."""
    body = dialect.error(error) if dialect else openai_error(error)
    if not writer.status:
        await writer.whole(error.status, body, error.headers)
    elif not writer.is_ended and stream is not None:
        await writer.end(stream.fail(body))
