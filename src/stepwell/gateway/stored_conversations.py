"""Conversations that a client continues by the id of a response, without sending them again.

- A step keeps what its call added: the messages, the reply, and the uid of the step before it. So the pool has it, with
  the trajectory, and any gateway finds it, also one that was restarted.
- Only the open trajectory of the call is searched: an id of another trajectory is unknown.
- A turn that redaction would mask is not stored, because it could not be continued as it was. The gateway that served
  it keeps it in memory, within a bound; any other does not know its id.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from stepwell.errors import PreviousResponseNotFound
from stepwell.gateway.dialects.chat_form import assistant_message, joined_system
from stepwell.gateway.dialects.dialect import ModelCall
from stepwell.gateway.dialects.openai import repair_messages
from stepwell.gateway.recording.outbox import Outbox
from stepwell.pool.api.producing import TrajectoryRef
from stepwell.pool.client import PoolClient
from stepwell.steps.step import Step

STORED = "stored_turn"
"""The key in a step's extras: {after, messages, reply}."""
SETTLE_TIMEOUT = 2.0
"""Seconds in which the pool must take what this gateway holds of the trajectory."""
MAX_KEPT_BYTES = 64 * 2**20
"""Bytes of turns that are kept here because they are not stored."""
UNKNOWN = "this trajectory has no stored response with this id; send the whole input instead"


@dataclass(slots=True)
class StoredConversations:
    pool: PoolClient
    outbox: Outbox
    settle_timeout: float = SETTLE_TIMEOUT
    max_kept_bytes: int = MAX_KEPT_BYTES
    _kept: OrderedDict[tuple[str, str], bytes] = field(default_factory=OrderedDict)
    """The turns that are not stored, as JSON, by trajectory and uid of the step."""
    _kept_bytes: int = 0

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

    def keep_masked(self, steps: Sequence[Step], redacted: Sequence[Step]) -> Sequence[Step]:
        """The redacted steps, without turns that are masked. Those are kept here, also for steps that were dropped."""
        after = redacted or [replace(step, extras={}) for step in steps]
        masked = [new.extras.get(STORED) != old.extras.get(STORED) for old, new in zip(steps, after, strict=True)]
        for step, is_masked in zip(steps, masked, strict=True):
            if is_masked:
                self._keep(step)
        return [_without_turn(step) if is_masked else step for step, is_masked in zip(redacted, masked, strict=False)]

    def drop(self, trajectory_uid: str) -> None:
        for key in [key for key in self._kept if key[0] == trajectory_uid]:
            self._kept_bytes -= len(self._kept.pop(key))

    def _keep(self, step: Step) -> None:
        turn = orjson.dumps(step.extras[STORED])
        self._kept[step.trajectory_uid, step.uid] = turn
        self._kept_bytes += len(turn)
        while self._kept_bytes > self.max_kept_bytes:
            self._kept_bytes -= len(self._kept.popitem(last=False)[1])

    async def _turns_before(self, uid: str, ref: TrajectoryRef) -> list[tuple[str, Any]]:
        """The stored turns up to that step, with their uids."""
        await self.outbox.settle(ref.trajectory_uid, self.settle_timeout)
        found: Mapping[str, Any] = await self.pool.step_extras(ref.trajectory_uid, ref.prompt_uid, STORED, uid)
        if self._kept:
            trajectory = ref.trajectory_uid
            kept = {step: orjson.loads(turn) for (of, step), turn in self._kept.items() if of == trajectory}
            found = {**found, **kept}
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


def _without_turn(step: Step) -> Step:
    return replace(step, extras={name: value for name, value in step.extras.items() if name != STORED})


def _chain(uid: str, found: Mapping[str, Any]) -> list[tuple[str, Any]] | None:
    """The turns from the first to the one with this uid; None if one is missing."""
    turns: list[tuple[str, Any]] = []
    while uid:
        if uid not in found or len(turns) > len(found):
            return None
        turns.append((uid, orjson.loads(orjson.dumps(found[uid]))))  # a copy: it is changed
        uid = turns[-1][1]["after"]
    return turns[::-1]
