"""Conversations that a client continues by the id of a response, without sending them again.

- A step keeps what its call added: the messages, the reply, and the uid of the step before it. So the pool has it, with
  the trajectory, and any gateway finds it, also one that was restarted.
- Only the open trajectory of the call is searched: an id of another trajectory is unknown.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from stepwell.errors import PreviousResponseNotFound
from stepwell.gateway.dialects.chat import repair_messages
from stepwell.gateway.dialects.chat_form import assistant_message, joined_system
from stepwell.gateway.dialects.dialect import ModelCall
from stepwell.gateway.recording.outbox import Outbox
from stepwell.pool.api.ports import StepSink
from stepwell.pool.api.producing import TrajectoryRef
from stepwell.steps.step import Step

STORED = "stored_turn"
"""In a step's extras: {after, messages, reply}."""
SETTLE_TIMEOUT = 2.0
"""Seconds in which the pool must take what this gateway holds of the trajectory."""
UNKNOWN = "this trajectory has no stored response with this id; send the whole input instead"


@dataclass(frozen=True, slots=True)
class StoredConversations:
    pool: StepSink
    outbox: Outbox
    settle_timeout: float = SETTLE_TIMEOUT

    async def complete(self, call: ModelCall, ref: TrajectoryRef) -> ModelCall:
        """The call with the whole conversation. PreviousResponseNotFound if what it continues is not stored."""
        if call.part is None or not call.part.after:
            return call
        turns = await self._turns_before(call.part.after, ref)
        history = [message for _, turn in turns for message in (*turn["messages"], turn["reply"])]
        messages = joined_system([*call.part.instructions, *history, *call.part.messages])
        return call._replace(
            request={**call.request, "messages": messages},
            malformed_history=repair_messages(messages),
            echoed=tuple(dict.fromkeys((*(uid for uid, _ in turns), *call.echoed))),
        )

    async def _turns_before(self, uid: str, ref: TrajectoryRef) -> list[tuple[str, Any]]:
        """The stored turns up to that step, with their uids."""
        await self.outbox.settle(ref.trajectory_uid, self.settle_timeout)
        found = await self.pool.step_extras(ref.trajectory_uid, ref.prompt_uid, STORED, uid)
        turns = _chain(uid, found)
        if turns is None:
            raise PreviousResponseNotFound(UNKNOWN)
        return turns


def store_turn(
    call: ModelCall, steps: Sequence[Step], replies: Callable[[], Sequence[Mapping[str, Any] | None]]
) -> Sequence[Step]:
    """The steps of a call, with what a later call needs to continue them. `replies` are chat messages."""
    if call.part is None or not call.part.is_stored or len(steps) != 1:
        return steps
    (step,), reply = steps, replies()[0] or {}
    thought = reply.get("reasoning") or reply.get("reasoning_content") or ""
    message = assistant_message(reply.get("content") or "", thought, reply.get("tool_calls") or [])
    turn = {"after": call.part.after, "messages": call.part.messages, "reply": message}
    return [replace(step, extras={**step.extras, STORED: orjson.loads(orjson.dumps(turn))})]


def _chain(uid: str, found: Mapping[str, Any]) -> list[tuple[str, Any]] | None:
    """From the first turn to the one with this uid; None if one is missing."""
    turns: list[tuple[str, Any]] = []
    while uid:
        if uid not in found or len(turns) > len(found):
            return None
        turns.append((uid, orjson.loads(orjson.dumps(found[uid]))))  # a copy: it is changed
        uid = turns[-1][1]["after"]
    return turns[::-1]
