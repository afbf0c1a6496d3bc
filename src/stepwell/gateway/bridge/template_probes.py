"""Knowledge of an engine's chat template, gained by asking the engine to render stand-in conversations.

A shape of continuation is probed once, with some renderings at the same time. After that each call takes one.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field
from secrets import choice
from typing import Any, Protocol, TypeVar

from stepwell.gateway.bridge.recorded_turns import BridgeOutcome, CannotBridge, ThinkingPlaces
from stepwell.steps.step import IntArray

MOST_PROBES = 1_000
UNFIT_SECONDS = 600.0
"""How long a template counts as unfit for a shape of continuation: what it shows may depend on the day."""
T = TypeVar("T")


class Renderer(Protocol):
    """One chat template with its fields, as an engine renders it."""

    @property
    def key(self) -> Hashable:
        """Equal for renderers that give the same ids."""

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
        renderer: Renderer,
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

    def begin(self, renderer: Renderer, shape: ContinuationShape) -> None:
        """Probe a shape that will probably be asked for."""
        self._start((renderer.key, shape), lambda: self._anchor(renderer, shape))

    async def check_thinking(self, renderer: Renderer, shape: ContinuationShape, places: ThinkingPlaces) -> None:
        """CannotBridge unless the template shows the reply's thinking, and as much of the earlier thinking with the new
        messages as without."""
        if not await self._once(
            (renderer.key, shape, places), lambda: _ThinkingProbe(renderer, shape, places, self).is_kept()
        ):
            raise CannotBridge(BridgeOutcome.THINKING)

    async def _anchor(self, renderer: Renderer, shape: ContinuationShape) -> ReplyAnchor:
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
    renderer: Renderer
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
