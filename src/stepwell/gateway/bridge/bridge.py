"""Decides for each chat call whether it can be sent as exact token ids, and makes them.

A failure never reaches the agent: a call that cannot be continued is rendered by its engine, and its reason is counted.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from stepwell.engines.fleet import EngineFleet
from stepwell.errors import StepwellError
from stepwell.gateway.bridge.digests import (
    TEMPLATE_FIELDS,
    RequestDigest,
    conversation_digest_of,
    digest_request,
    read_conversation_digest,
)
from stepwell.gateway.bridge.recorded_turns import (
    BridgeOutcome,
    CannotBridge,
    RecentTurns,
    ThinkingPolicy,
    Turn,
    continued_turns,
    find_parent,
    thinking_to_prove,
)
from stepwell.gateway.bridge.template_probes import (
    FILLER,
    TAIL_ROLES,
    ChatMessage,
    TemplateProbes,
    shape_of,
    stand_in_tools,
)
from stepwell.gateway.dialects.dialect import ModelCall
from stepwell.pool.api.producing import TrajectoryRef
from stepwell.pool.client import PoolClient
from stepwell.steps.step import BRIDGED, RENDERED, IntArray, JsonObject, Step
from stepwell.wire.openai import Upstream

log = logging.getLogger("stepwell.gateway")

RENDER_TIMEOUT = 2.0
POOL_TIMEOUT = 1.0
MOST_PROOFS = 1_000
ASK_PAUSE = 10.0
"""Seconds until the pool is asked again after it did not answer."""
OTHER_PROMPTS = ("continue_final_message", "echo", "truncate_prompt_tokens", "prompt_embeds")
"""Fields by which a request asks for another prompt than its messages alone give."""
NOT_DIGESTED = RequestDigest("", "", "")
"""The digest of calls to engines that do not render. They cannot be continued."""


@dataclass(slots=True, eq=False)
class PromptPlan:
    """How the prompt of one call is made."""

    body: Mapping[str, Any]
    """The chat request."""
    request: RequestDigest
    outcome: BridgeOutcome
    parent: Turn | None = None
    ids: IntArray | None = None
    """The exact prompt; None if the engine renders the messages."""
    template: str = ""
    """The chat template for which the ids were made."""
    continued: Sequence[Turn] = ()
    """The turns that the call's history ends with, whether its prompt is made of them or not."""

    def give_up(self, outcome: BridgeOutcome) -> None:
        """The engine renders the messages after all."""
        self.outcome, self.parent, self.ids = outcome, None, None

    def check_echo(self, prompt_ids: IntArray) -> None:
        """The engine has reported the prompt that it used."""
        if self.ids is not None and not np.array_equal(self.ids, prompt_ids):
            self.give_up(BridgeOutcome.ECHO_DIFFERS)

    @property
    def can_be_continued(self) -> bool:
        return self.request is not NOT_DIGESTED

    @property
    def prompt_made(self) -> str:
        return BRIDGED if self.outcome is BridgeOutcome.BRIDGED else f"{RENDERED}: {self.outcome}"


@dataclass(slots=True, eq=False, kw_only=True)
class Bridge:
    engines: EngineFleet
    pool: PoolClient
    thinking: ThinkingPolicy = ThinkingPolicy.TEMPLATE
    turns: RecentTurns = field(default_factory=RecentTurns)
    probes: TemplateProbes = field(default_factory=TemplateProbes)
    render_timeout: float = RENDER_TIMEOUT
    pool_timeout: float = POOL_TIMEOUT
    clock: Callable[[], float] = time.monotonic
    _ask_again_at: float = 0.0
    _proofs: dict[Hashable, asyncio.Task[bool]] = field(default_factory=dict)

    async def plan(self, call: ModelCall, ref: TrajectoryRef) -> PromptPlan | None:
        """How the prompt of a call is made. None for calls that have no messages."""
        if call.upstream is not Upstream.CHAT:
            return None
        if not self.engines.template:
            return PromptPlan(call.request, NOT_DIGESTED, BridgeOutcome.NO_RENDERER)
        try:
            asked = digest_request(call.request, self.engines.template)
        except Exception:
            log.exception("a conversation has no digest; its turns are not joined")
            return None
        plan = PromptPlan(call.request, asked, BridgeOutcome.FIRST_TURN)
        if asked.reply_at >= 0:
            try:
                await self._continue(plan, call, ref)
            except CannotBridge as why:
                plan.give_up(why.outcome)
            except Exception:
                log.exception("a call of trajectory %s is not bridged", ref.trajectory_uid)
                plan.give_up(BridgeOutcome.FAILED)
        return plan

    def conversation_digests(self, plan: PromptPlan, replies: Sequence[Mapping[str, Any] | None]) -> list[JsonObject]:
        """The conversation digests that the steps of a call keep, one for each reply as it is served; empty for one
        that cannot be read."""
        inherited = plan.parent.conversation_digest.thoughts if plan.parent is not None else {}
        conversation_digests: list[JsonObject] = []
        for reply in replies:
            try:
                kept = None if reply is None else conversation_digest_of(plan.request, reply, inherited)
            except Exception:
                log.exception("a reply has no digest; it is not continued")
                kept = None
            conversation_digests.append({} if kept is None else {**kept.to_json(), "thinking": self.thinking})
            if kept is not None and reply is not None and plan.outcome is BridgeOutcome.FIRST_TURN:
                self._foresee(plan, reply)
        return conversation_digests

    def note(self, plan: PromptPlan, steps: Sequence[Step]) -> None:
        """Remember the steps of a call, before its agent can continue them."""
        if not plan.can_be_continued:
            return
        if steps:
            self._prove(plan, steps[0].prompt_ids)
        for step in steps:
            if (turn := turn_of(step)) is not None:
                others = tuple(other.uid for other in steps if other is not step)
                self.turns.add(step.trajectory_uid, replace(turn, others=others), plan.parent)

    async def _continue(self, plan: PromptPlan, call: ModelCall, ref: TrajectoryRef) -> None:
        """CannotBridge says why the call cannot be continued."""
        request, messages = call.request, call.request["messages"]
        asked = plan.request
        head: Sequence[ChatMessage] = messages[: asked.reply_at]
        tail: Sequence[ChatMessage] = messages[asked.reply_at + 1 :]
        plan.continued = continued_turns(self.turns.of(ref.trajectory_uid), asked)
        _check_request(request, asked, tail)
        template = self.engines.template
        if not template:
            raise CannotBridge(BridgeOutcome.NO_RENDERER)
        parent = await self._parent(plan, ref, call.echoed)
        places = thinking_to_prove(self.thinking, parent, asked, messages)
        renderer, reply = EngineRenderer(self.engines, template, request, asked), messages[asked.reply_at]
        try:
            async with asyncio.timeout(self.render_timeout):
                await self._check_proved(renderer)
                if places:
                    await self.probes.check_thinking(renderer, shape_of(reply, tail, head), places)
                delta = await self.probes.delta(renderer, reply, tail, int(parent.tokens[-1]), head)
        except TimeoutError:
            raise CannotBridge(BridgeOutcome.RENDER_FAILED) from None
        plan.outcome, plan.parent, plan.template = BridgeOutcome.BRIDGED, parent, template
        plan.ids = np.concatenate([parent.tokens, delta])

    def _foresee(self, plan: PromptPlan, reply: Mapping[str, Any]) -> None:
        """Probe the template for the likely continuation, so that the agent need not wait for it."""
        template, head = self.engines.template, plan.body["messages"]
        if not template or not plan.request.is_text or _asks_for_another_prompt(plan.body):
            return
        calls = len(reply.get("tool_calls") or [])
        shape = shape_of(reply, [{"role": "tool"}] * calls or [{"role": "user"}], head)
        self.probes.begin(EngineRenderer(self.engines, template, plan.body, plan.request), shape)

    def _prove(self, plan: PromptPlan, prompt_ids: IntArray) -> None:
        """Compare, once for each kind of request, what the engine rendered for a call with what its renderer gives."""
        request, template = plan.body, self.engines.template
        if not template or plan.ids is not None or self.engines.renders_chat or not plan.request.is_text:
            return
        renderer = EngineRenderer(self.engines, template, request, plan.request)
        if renderer.key not in self._proofs and not _asks_for_another_prompt(request):
            if len(self._proofs) >= MOST_PROOFS:
                self._proofs.clear()
            self._proofs[renderer.key] = asyncio.create_task(self._is_proved(renderer, prompt_ids))

    async def _is_proved(self, renderer: "EngineRenderer", prompt_ids: IntArray) -> bool:
        try:
            rendered = await self.engines.render(renderer.request, renderer.template)
        except StepwellError:
            self._proofs.pop(renderer.key, None)
            return False
        return np.array_equal(rendered, prompt_ids)

    async def _check_proved(self, renderer: "EngineRenderer") -> None:
        if not self.engines.renders_chat:
            proof = self._proofs.get(renderer.key)
            if proof is None or not await asyncio.shield(proof):
                raise CannotBridge(BridgeOutcome.UNPROVEN)

    async def _parent(self, plan: PromptPlan, ref: TrajectoryRef, echoed: Sequence[str]) -> Turn:
        """Finds the parent among the turns that this gateway remembers, and if it is not there, in the pool."""
        asked, turns = plan.request, self.turns.of(ref.trajectory_uid)
        try:
            return find_parent(turns, asked, echoed)
        except CannotBridge as why:
            if why.outcome not in (BridgeOutcome.NO_PARENT, BridgeOutcome.EDITED):
                raise
        turns = [*turns, *await self._ask_pool(asked, ref)]
        plan.continued = continued_turns(turns, asked)
        return find_parent(turns, asked, echoed)

    async def _ask_pool(self, asked: RequestDigest, ref: TrajectoryRef) -> list[Turn]:
        """The turns that another gateway recorded, or this one before its restart."""
        if self.clock() < self._ask_again_at:
            raise CannotBridge(BridgeOutcome.POOL_AWAY)
        try:
            async with asyncio.timeout(self.pool_timeout):
                found = await self.pool.turns(ref.trajectory_uid, ref.prompt_uid, asked.replied)
        except (StepwellError, TimeoutError):
            self._ask_again_at = self.clock() + ASK_PAUSE
            raise CannotBridge(BridgeOutcome.POOL_AWAY) from None
        read = [(turn, read_conversation_digest(turn.lineage)) for turn in found]
        return [Turn(turn.uid, turn.tokens, turn.finish_reason, digest, turn.others) for turn, digest in read if digest]


@dataclass(frozen=True, slots=True)
class EngineRenderer:
    """The engines' chat template, with the fields of one request."""

    engines: EngineFleet
    template: str
    request: Mapping[str, Any]
    asked: RequestDigest

    @property
    def key(self) -> Hashable:
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


def turn_of(step: Step) -> Turn | None:
    """None for a step that nobody can continue."""
    digest = read_conversation_digest(step.lineage)
    if digest is None or step.quarantine is not None:
        return None
    return Turn(step.uid, np.concatenate([step.prompt_ids, step.response_ids]), step.finish_reason, digest)


def _check_request(request: Mapping[str, Any], asked: RequestDigest, tail: Sequence[ChatMessage]) -> None:
    if not tail:
        raise CannotBridge(BridgeOutcome.NO_TAIL)
    if any(message["role"] not in TAIL_ROLES for message in tail):
        raise CannotBridge(BridgeOutcome.TAIL_ROLE)
    if not asked.is_text:
        raise CannotBridge(BridgeOutcome.MEDIA)
    if _asks_for_another_prompt(request):
        raise CannotBridge(BridgeOutcome.OPTIONS)


def _asks_for_another_prompt(request: Mapping[str, Any]) -> bool:
    return request.get("add_generation_prompt") is False or any(request.get(name) for name in OTHER_PROMPTS)
