"""Model calls that are not recorded: of clients that keep their tokens themselves, such as environments, and of users
who do not want it.

The former call below /unrecorded. Their calls are forwarded like an agent's: every sampling parameter explicit, to a
healthy engine, held while engines pause, continued if an engine breaks off.

- Ids and log-probabilities that the engine gives are consistent, or the call fails; a stream ends in an error then.
- A whole answer has everything. A stream has what it asks for, as an agent's.
- Ids that are made from text are marked as such. A choice whose ids cannot be made has none.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from stepwell.errors import EngineUnavailable, PreviousResponseNotFound
from stepwell.gateway.dialects.dialect import ModelCall
from stepwell.gateway.dialects.openai_choices import ChoicesReply, Wants
from stepwell.pool.api.producing import TrajectoryRef
from stepwell.steps.step import Exactness, Step
from stepwell.wire.openai import Upstream

NO_TRAJECTORY = TrajectoryRef("", "")
UNRECORDED_HEADER = b"x-stepwell-unrecorded"
"""The header in every answer that is not recorded: the cause."""


class Unrecorded(StrEnum):
    """Why a call is not recorded."""

    URL = "unrecorded_url"
    """The URL is for calls that are not recorded: /unrecorded, or /generate."""
    HEADER = "header"
    """The call says so."""
    SESSION = "session"
    """The session was opened for calls that are not recorded."""
    KEY = "key"
    """The session key was issued for calls that are not recorded."""
    SAMPLE = "sample"
    """The session is not in the share of sessions that are recorded."""
    POOL = "pool"
    """The pool cannot take a new trajectory now: it is away, or full."""
    DELETED = "forgotten"
    """The data of its subject was deleted on request. Only the metrics tell it: an answer must not say who that is."""


EVERYTHING = Wants(ids=True, logprobs=True, usage=True)


def as_unrecorded(call: ModelCall) -> ModelCall:
    if call.part is not None and call.part.after:
        raise PreviousResponseNotFound("calls that name no trajectory are not stored; send the whole input")
    return call._replace(wants=call.wants if call.stream else EVERYTHING, part=None)


def as_uncaptured(call: ModelCall) -> ModelCall:
    """An agent's call that is answered as always, and leaves nothing behind."""
    if call.part is not None and call.part.after:
        raise PreviousResponseNotFound(
            "a call that is not recorded has no stored response before it; send the whole input"
        )
    return call._replace(part=None)


def add_origins(call: ModelCall, answer: ChoicesReply, steps: Sequence[Step]) -> None:
    """Add to each choice which weights wrote it, how it was sampled, and how exact its ids are.

    Its step is what it would be recorded as.
    """
    require_consistent(steps)
    for choice, step in zip(answer.message["choices"], steps, strict=True):
        if step.exactness is Exactness.RETOKENIZED:
            _add_ids(answer.message if call.upstream is Upstream.CHAT else choice, choice, step)
        choice["exactness"] = step.exactness
        choice["policy_version"] = step.policy_version
        choice["temperature"] = step.temperature
        choice["untrainable"] = step.untrainable
        choice["version_spans"] = [list(span) for span in step.version_spans]


def require_consistent(steps: Sequence[Step]) -> None:
    for step in steps:
        if step.exactness is Exactness.ENGINE and step.quarantine is not None:
            raise EngineUnavailable(f"the engine's answer cannot be trained on: {step.quarantine}")


def _add_ids(prompt_holder: dict[str, Any], choice: dict[str, Any], step: Step) -> None:
    """Adds ids where vLLM has them: a chat's prompt ids are in the answer, a completion's in each choice."""
    prompt_holder["prompt_token_ids"] = step.prompt_ids.tolist() or None
    choice["token_ids"] = step.response_ids.tolist() if step.quarantine is None else None
