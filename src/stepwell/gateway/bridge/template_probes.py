"""The tokens that a chat template puts after a reply, cut out of a rendering of a short stand-in conversation.

The reply is replaced by a sentinel, in the last tool call's arguments if it has calls. What follows the sentinel in the
rendered ids is the end of the reply and the new messages. The parent's tokens already have the token that ended the
reply, so the delta begins right after it.

A template is probed once for each shape of a continuation, with some renderings at the same time. After that each call
takes one. The probes show:
- The ids before the reply are the same whether or not the new messages follow.
- What follows the sentinel does not depend on what comes before it: earlier turns, tools, the reply's other texts.
- The sentinel is shown, and the new messages are shown after it.
- The reply ends in the token that the model sampled last, before anything of the new messages. This holds also where
  this token opens the next message, and not where a template writes another one in its place. It stands there once.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from secrets import choice
from typing import Any, TypeVar

import numpy as np
import orjson

from stepwell.engines.fleet import EngineFleet
from stepwell.errors import StepwellError
from stepwell.gateway.bridge.digests import TEMPLATE_FIELDS, RequestDigest
from stepwell.gateway.bridge.recorded_turns import BridgeOutcome, CannotBridge, ThinkingPlaces
from stepwell.steps.prefix_tree import common_prefix
from stepwell.steps.step import IntArray

TAIL_ROLES = ("tool", "user", "system")
INSTRUCTIONS = ("developer", "system")
"""If there are both, vLLM handles them as if all were of the first."""
QUESTION = {"role": "user", "content": "hi"}
FILLER, OTHER_FILLER = "ok", "no"
CALL_IDS, EARLIER_CALL_ID = ("callaaaa1", "callaaaa2"), "callaaaa0"
"""Nine letters and digits: Mistral's templates accept no others."""
TOOL_NAME = "lookup"

ChatMessage = Mapping[str, Any]
MOST_PROBES = 1_000
UNFIT_SECONDS = 600.0
"""How long a template counts as unfit for a shape of continuation: what it shows may depend on the day."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ContinuationShape:
    """The features that decide how a chat template renders a reply and the messages after it, apart from their
    texts."""

    calls: int
    """Tool calls of the reply; 2 stands for several."""
    has_text: bool
    roles: tuple[str, ...]
    """The roles of the new messages; of several alike in a row, the first two."""
    instructions: str = ""
    """The role of the instructions before the reply, one of INSTRUCTIONS; empty if there are none."""


def shape_of(reply: ChatMessage, tail: Sequence[ChatMessage], head: Sequence[ChatMessage] = ()) -> ContinuationShape:
    before = {message["role"] for message in head}
    runs = (list(run)[:2] for _, run in groupby(message["role"] for message in tail))
    roles = tuple(role for run in runs for role in run)
    calls = min(2, len(reply.get("tool_calls") or []))
    instructions = next((role for role in INSTRUCTIONS if role in before), "")
    return ContinuationShape(calls, bool(reply.get("content")), roles, instructions)


def model_head(shape: ContinuationShape) -> list[ChatMessage]:
    """The messages before the reply, as few as possible."""
    return [*([{"role": shape.instructions, "content": FILLER}] if shape.instructions else []), QUESTION]


def other_model_head(shape: ContinuationShape) -> list[ChatMessage]:
    """The same with other texts and earlier turns."""
    roles = [*([shape.instructions] if shape.instructions else []), "user", "assistant", "user"]
    head: list[ChatMessage] = [{"role": role, "content": OTHER_FILLER} for role in roles]
    if not shape.calls:
        return head
    called = {"role": "assistant", "content": None, "tool_calls": [_call(EARLIER_CALL_ID, TOOL_NAME, OTHER_FILLER)]}
    return [*head, called, {"role": "tool", "tool_call_id": EARLIER_CALL_ID, "content": OTHER_FILLER}]


def model_reply(shape: ContinuationShape) -> ChatMessage:
    """A reply of that shape."""
    content = FILLER if shape.has_text or not shape.calls else None
    calls = [_call(call_id, TOOL_NAME, FILLER) for call_id in CALL_IDS[: shape.calls]]
    return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}


def model_tail(shape: ContinuationShape, text: str) -> list[ChatMessage]:
    """New messages of that shape."""
    tail: list[ChatMessage] = []
    tools = 0
    for role in shape.roles:
        message = {"role": role, "content": text}
        if role == "tool":
            message["tool_call_id"] = CALL_IDS[min(tools, max(0, shape.calls - 1))]
            tools += 1
        tail.append(message)
    return tail


def stand_in(reply: ChatMessage, sentinel: str, filler: str = FILLER) -> ChatMessage:
    """A message with the tool calls of `reply` and the sentinel as the last that it says, after fillers."""
    calls = reply.get("tool_calls") or []
    if not calls:
        return {"role": "assistant", "content": sentinel}
    said = [filler] * (len(calls) - 1) + [sentinel]
    named = [(str(call.get("id")), str(call["function"]["name"])) for call in calls]
    return {
        "role": "assistant",
        "content": filler if reply.get("content") else None,
        "tool_calls": [_call(call_id, name, text) for (call_id, name), text in zip(named, said, strict=True)],
    }


def stand_in_tools(reply: ChatMessage, filler: str = FILLER) -> list[ChatMessage]:
    """Small tools with the names that `reply` calls: templates only look at what they show of them."""
    names = dict.fromkeys(str(call["function"]["name"]) for call in reply.get("tool_calls") or []) or [TOOL_NAME]
    value = {"type": "object", "properties": {"value": {"type": "string", "description": filler}}}
    return [
        {"type": "function", "function": {"name": name, "description": filler, "parameters": value}} for name in names
    ]


@dataclass(frozen=True, slots=True)
class ReplyAnchor:
    """How a template shows a sentinel and what stands between it and the new messages."""

    sentinel: IntArray
    follows: IntArray
    is_call: bool
    """The sentinel is in a tool call, so that the call's end comes before the reply's."""

    def until(self, last_token: int) -> IntArray:
        """The sentinel and what follows it, to the token that the model sampled last."""
        ends = np.flatnonzero(self.follows == last_token)
        if len(ends) != 1 or (ends[0] and not self.is_call):
            raise CannotBridge(BridgeOutcome.CLOSE_DIFFERS)
        return np.concatenate([self.sentinel, self.follows[: ends[0] + 1]])


def find_anchor(
    shown: IntArray,
    other_sentinel: IntArray,
    other_tail: IntArray,
    other_head: IntArray,
    head: IntArray,
    *,
    is_call: bool,
) -> ReplyAnchor:
    """Finds the anchor in renderings of a stand-in conversation: once as it is, with another sentinel, with other new
    messages, with all else other, and only what comes before the reply."""
    start, end = common_prefix(shown, other_sentinel), len(shown) - common_prefix(shown[::-1], other_sentinel[::-1])
    if start < len(head) or not np.array_equal(shown[: len(head)], head):
        raise CannotBridge(BridgeOutcome.HEAD_CHANGES)
    tail_at = common_prefix(shown, other_tail)
    if not start < end <= tail_at < len(shown):
        raise CannotBridge(BridgeOutcome.NOT_ANCHORED)
    if not np.array_equal(other_head[start - len(shown) :], shown[start:]):
        raise CannotBridge(BridgeOutcome.HEAD_CHANGES)
    return ReplyAnchor(shown[start:end], shown[end:tail_at], is_call)


def cut_delta(rendered: IntArray, anchor: IntArray) -> IntArray:
    """The tokens that follow the anchor, which must be there once."""
    raw, wanted = rendered.tobytes(), anchor.tobytes()
    found = _aligned(raw, wanted, 0)
    if found < 0 or _aligned(raw, wanted, found + rendered.itemsize) >= 0:
        raise CannotBridge(BridgeOutcome.NOT_ANCHORED)
    return rendered[found // rendered.itemsize + len(anchor) :]


def _aligned(raw: bytes, wanted: bytes, start: int) -> int:
    found = raw.find(wanted, start)
    while found >= 0 and found % 4:
        found = raw.find(wanted, found + 1)
    return found


def _call(call_id: str, name: str, text: str) -> dict[str, Any]:
    arguments = orjson.dumps({"value": text}).decode()
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


@dataclass(slots=True, eq=False)
class EngineRenderer:
    """The engines' chat template, with the fields of one request."""

    engines: EngineFleet
    template: str
    request: Mapping[str, Any]
    asked: RequestDigest

    @property
    def key(self) -> Hashable:
        """Equal for renderers that give the same ids."""
        return self.template, self.asked.template, bool(self.request.get("tools")), self._hides_tools

    @property
    def _hides_tools(self) -> bool:
        return self.request.get("tool_choice") == "none"

    async def render(
        self,
        messages: Sequence[ChatMessage],
        reply: ChatMessage,
        *,
        add_generation_prompt: bool = True,
        filler: str = FILLER,
    ) -> IntArray:
        """The ids of a prompt, with stand-ins for the tools that `reply` calls, which say `filler`. CannotBridge if
        there are none."""
        request: dict[str, Any] = {name: self.request.get(name) for name in ("model", *TEMPLATE_FIELDS)}
        request["messages"], request["add_generation_prompt"] = messages, add_generation_prompt
        if self.request.get("tools"):
            request["tools"] = stand_in_tools(reply, filler)
            if self._hides_tools:
                request["tool_choice"] = "none"
        try:
            ids = await self.engines.render(request, self.template)
        except StepwellError:
            raise CannotBridge(BridgeOutcome.RENDER_FAILED) from None
        if not len(ids):
            raise CannotBridge(BridgeOutcome.RENDER_FAILED)
        return ids


def random_word() -> str:
    """No text of a client has it."""
    return "".join(choice("bdfgjkpqvwxz") for _ in range(16))


@dataclass(slots=True)
class TemplateProbes:
    sentinel: str = field(default_factory=random_word)
    other: str = field(default_factory=lambda: "m" + random_word() + "m")
    """The other word, which shares no letter at its ends with the sentinel."""
    _probes: OrderedDict[Hashable, asyncio.Future[Any]] = field(default_factory=OrderedDict)

    async def delta(
        self,
        renderer: EngineRenderer,
        reply: ChatMessage,
        tail: Sequence[ChatMessage],
        last_token: int,
        head: Sequence[ChatMessage] = (),
    ) -> IntArray:
        """The ids that follow `last_token`, the end of `reply`, when the messages of `tail` are added. `head` is what
        comes before the reply."""
        shape = shape_of(reply, tail, head)
        anchor = (await self._once((renderer.key, shape), lambda: self._anchor(renderer, shape))).until(last_token)
        rendered = await renderer.render([*model_head(shape), stand_in(reply, self.sentinel), *tail], reply)
        return cut_delta(rendered, anchor)

    def begin(self, renderer: EngineRenderer, shape: ContinuationShape) -> None:
        """Probe a shape that will probably be asked for."""
        self._start((renderer.key, shape), lambda: self._anchor(renderer, shape))

    async def check_thinking(self, renderer: EngineRenderer, shape: ContinuationShape, places: ThinkingPlaces) -> None:
        """CannotBridge unless the template shows the reply's thinking, and as much of the earlier thinking with the new
        messages as without."""
        if not await self._once(
            (renderer.key, shape, places), lambda: _ThinkingProbe(renderer, shape, places, self).is_kept()
        ):
            raise CannotBridge(BridgeOutcome.THINKING)

    async def _anchor(self, renderer: EngineRenderer, shape: ContinuationShape) -> ReplyAnchor:
        reply = model_reply(shape)

        def shown(sentinel: str, text: str) -> Awaitable[IntArray]:
            return renderer.render([*model_head(shape), stand_in(reply, sentinel), *model_tail(shape, text)], reply)

        others = [*other_model_head(shape), stand_in(reply, self.sentinel, OTHER_FILLER)]
        found = await asyncio.gather(
            shown(self.sentinel, self.other),
            shown(self.other, self.other),
            shown(self.sentinel, self.sentinel[::-1]),
            renderer.render([*others, *model_tail(shape, self.other)], reply, filler=OTHER_FILLER),
            renderer.render(model_head(shape), reply, add_generation_prompt=False),
        )
        return find_anchor(*found, is_call=shape.calls > 0)

    async def _once(self, key: Hashable, probe: Callable[[], Awaitable[T]]) -> T:
        """Returns the result of a probe, or raises why there is none."""
        found: T = await asyncio.shield(self._start(key, probe))
        return found

    def _start(self, key: Hashable, probe: Callable[[], Awaitable[T]]) -> asyncio.Future[T]:
        known = self._probes.get(key)
        if known is None:
            known = self._probes[key] = asyncio.ensure_future(probe())
            known.add_done_callback(lambda done: self._note_end(key, done))
            if len(self._probes) > MOST_PROBES:
                self._probes.popitem(last=False)
        return known

    def _note_end(self, key: Hashable, done: asyncio.Future[Any]) -> None:
        """A probe that found nothing is repeated: at once if the engine failed, later if the template was unfit."""
        if done.cancelled() or (failure := done.exception()) is None:
            return
        is_unfit = isinstance(failure, CannotBridge) and failure.outcome is not BridgeOutcome.RENDER_FAILED
        asyncio.get_running_loop().call_later(UNFIT_SECONDS if is_unfit else 0, self._probes.pop, key, None)


@dataclass(slots=True)
class _ThinkingProbe:
    renderer: EngineRenderer
    shape: ContinuationShape
    places: ThinkingPlaces
    words: TemplateProbes

    async def is_kept(self) -> bool:
        before, after = await asyncio.gather(self._visible(with_tail=False), self._visible(with_tail=True))
        return before == after[: len(before)] and all(after[len(before) :])

    async def _visible(self, *, with_tail: bool) -> list[bool]:
        """Whether other thinking gives another prompt, for each place with thinking. The reply's comes last, and only
        with the new messages."""
        places = [self.places.earlier_turns, self.places.this_turn, self.places.in_reply and with_tail]
        one, other = self.words.sentinel, self.words.other
        shown = await self._render([one, one, one], with_tail=with_tail)
        changed = [index for index, is_there in enumerate(places) if is_there]
        others = [[other if index == at else one for index in range(3)] for at in changed]
        rendered = await asyncio.gather(*(self._render(thoughts, with_tail=with_tail) for thoughts in others))
        return [ids.tolist() != shown.tolist() for ids in rendered]

    async def _render(self, thoughts: Sequence[str], *, with_tail: bool) -> IntArray:
        earlier, this, last = thoughts
        reply, one_call = model_reply(self.shape), ContinuationShape(1, has_text=False, roles=())
        messages: list[ChatMessage] = model_head(self.shape)
        if self.places.earlier_turns:
            said = {"role": "assistant", "content": "yes"}
            messages += [self._thinking(said, earlier), QUESTION]
        if self.places.this_turn:
            answer = {"role": "tool", "tool_call_id": CALL_IDS[0], "content": "yes"}
            messages += [self._thinking(model_reply(one_call), this), answer]
        if with_tail:
            said_last = self._thinking(reply, last) if self.places.in_reply else reply
            messages += [said_last, *model_tail(self.shape, "yes")]
        return await self.renderer.render(messages, reply)

    def _thinking(self, message: ChatMessage, thought: str) -> ChatMessage:
        if self.places.is_inline:
            return {**message, "content": f"<think>\n{thought}\n</think>\n\n{message.get('content') or ''}"}
        return {**message, "reasoning": thought, "reasoning_content": thought}
