"""A conversation through the gateway's bridge, with a model that writes as its chat template does, and a judge.

The judge renders the whole conversation, which the bridge never does. A call that is sent as token ids is right if
- these ids begin with exactly the tokens that the engine had in the step that is continued,
- what follows them is how the template ends the whole conversation, right behind the reply as it was sampled, and the
  template shows the messages before the reply as it did,
- the model sees the thinking that the template shows, and no other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import orjson
from stepwell.gateway.bridge.recorded_turns import BridgeOutcome

from benchmarks.bridge_rig.public_templates import NotRendered, PublicTemplate
from benchmarks.bridge_rig.second_opinion import BridgedCall
from benchmarks.bridge_rig.template_writer import TemplateWriter, Written
from benchmarks.bridge_rig.tokenizing import Tokens
from rig.local_pool import LocalPool
from stepwell.engines.fleet import EngineFleet
from stepwell.gateway.bridge.bridge import Bridge, PromptPlan
from stepwell.gateway.bridge.template_probes import TemplateProbes
from stepwell.gateway.dialects import DIALECTS
from stepwell.gateway.dialects.dialect import DialectContext, ModelCall
from stepwell.gateway.recording.step_builder import PendingStep, PromptOrigin, build_steps
from stepwell.pool.api.producing import RecordedTurn, TrajectoryRef
from stepwell.steps.step import IntArray, logprobs_array
from stepwell.wire.openai import NO_USAGE, Sampled

CHAT = DIALECTS[0]
REF = TrajectoryRef("t", "p")
AROUND = DialectContext(response_length=64)
PATIENCE = 3600.0
"""Seconds for a rendering: nothing here waits for an engine, so a slow machine changes no result."""

Message = dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """What the model says, as it is served."""

    message: Message
    last: str
    """The word that it says last."""
    finish_reason: str = "stop"


@dataclass(frozen=True, eq=False)
class RecordedReply:
    """A step, as the judge remembers it."""

    request: Mapping[str, Any]
    reply: Reply
    written: Written
    prompt: IntArray
    response: IntArray

    @property
    def tokens(self) -> IntArray:
        return np.concatenate([self.prompt, self.response])


@dataclass
class TemplateEngine:
    """As much of a fleet as a bridge needs: it renders."""

    rendering: PublicTemplate
    tokens: Tokens
    renders_chat: bool = True

    @property
    def template(self) -> str:
        return f"{self.rendering.name} {self.tokens.name}"

    async def render(self, request: Mapping[str, Any], template: str) -> IntArray:
        gives_prompt = request.get("add_generation_prompt") is not False
        tools = request.get("tools") or []
        return self.tokens.encode(self.rendering.render(request["messages"], tools, add_generation_prompt=gives_prompt))


class EmptyPool(LocalPool):
    async def turns(self, trajectory_uid: str, prompt_uid: str, replied: str) -> list[RecordedTurn]:
        return []


@dataclass
class Judged:
    """What became of the calls that might have been bridged."""

    outcomes: list[BridgeOutcome] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """Of calls that were bridged: what is wrong with them."""
    bridged: list[BridgedCall] = field(default_factory=list)


class Talk:
    def __init__(self, template: PublicTemplate, tokens: Tokens, probes: TemplateProbes) -> None:
        self.template, self.tokens = template, tokens
        self.judged = Judged()
        self._writer = TemplateWriter(template, tokens)
        self._steps: dict[str, RecordedReply] = {}
        self._bridge = Bridge(
            engines=cast("EngineFleet", TemplateEngine(template, tokens)),
            pool=EmptyPool(),
            probes=probes,
            render_timeout=PATIENCE,
        )

    async def ask(self, messages: Sequence[Message], tools: Sequence[Any], reply: Reply | None = None) -> None:
        """A call, and the model's reply to it; without a reply, only its prompt is made. NotRendered if the template
        refuses the messages."""
        asked = {"model": "m", "messages": messages, **({"tools": tools} if tools else {})}
        call = CHAT.read(orjson.dumps(asked), AROUND)
        plan = await self._bridge.plan(call, REF)
        assert plan is not None
        if plan.outcome is not BridgeOutcome.FIRST_TURN:
            self.judged.outcomes.append(plan.outcome)
        if plan.ids is not None:
            self._judge(plan, call)
        elif plan.outcome is not BridgeOutcome.MEDIA:
            self._prompt(call)
        if reply is not None:
            self._answer(plan, call, reply)

    def _prompt(self, call: ModelCall) -> str:
        return self.template.render(call.request["messages"], call.request.get("tools") or [])

    def _answer(self, plan: PromptPlan, call: ModelCall, reply: Reply) -> None:
        prompt = self.tokens.encode(self._prompt(call)) if plan.ids is None else plan.ids
        written = self._write(call, reply)
        response = self.tokens.encode(written.text)
        sampled = Sampled(prompt, response, logprobs_array([-1.0] * len(response)), reply.finish_reason)
        origin = PromptOrigin(plan.prompt_made, self._bridge.conversation_digests(plan, [reply.message]))
        begun = PendingStep("t", "p", uid=f"step {len(self._steps)}")
        steps = build_steps(begun, [sampled], NO_USAGE, prompt_length=10**6, origin=origin)
        self._bridge.note(plan, steps)
        self._steps[begun.uid] = RecordedReply(call.request, reply, written, prompt, response)

    def _write(self, call: ModelCall, reply: Reply) -> Written:
        sent_back = {"model": "m", "messages": [*call.request["messages"], reply.message]}
        messages = CHAT.read(orjson.dumps(sent_back), AROUND).request["messages"]
        return self._writer.write(messages, call.request.get("tools") or [], reply.last)

    def _judge(self, plan: PromptPlan, call: ModelCall) -> None:
        assert plan.parent is not None
        assert plan.ids is not None
        step, messages = self._steps[plan.parent.uid], call.request["messages"]
        known, delta = len(step.tokens), plan.ids[len(step.tokens) :]
        try:
            whole = self._prompt(call)
            replied = messages[: plan.request.reply_at + 1]
            alone = self.template.render(replied, call.request.get("tools") or [], add_generation_prompt=False)
        except NotRendered:
            self.judged.faults.append("the template refuses the messages")
            return
        before, text, rendered = self.tokens.decode(step.tokens), self.tokens.decode(delta), self.tokens.encode(whole)
        encoded, shown_before = rendered[-len(delta) :], _before(alone, step.reply)
        checks = {
            "the ids do not begin with those of the step": np.array_equal(plan.ids[:known], step.tokens),
            "the step is another conversation": _is_continued(step, call.request, plan.request.reply_at),
            "the reply was cut short": step.reply.finish_reason != "length",
            "the template does not end so": bool(text) and whole.endswith(text),
            "the template ends the reply in another way": bool(step.written.end)
            and _squeezed(whole[: len(whole) - len(text)]).endswith(_squeezed(step.written.end)),
            "the tokenizer makes other ids of the new text": np.array_equal(encoded, delta),
            "the template changes what comes before": _squeezed(whole).startswith(_squeezed(shown_before)),
            "the template shows other thinking": all((t in before) == (t in whole) for t in self._thoughts()),
        }
        self.judged.faults += [fault for fault, is_right in checks.items() if not is_right]
        self.judged.bridged.append(
            BridgedCall(
                template=self.template.name,
                tokens=self.tokens.name,
                controls=self.tokens.controls,
                prompt=step.prompt,
                response=step.response,
                messages=messages,
                reply_at=plan.request.reply_at,
                tools=call.request.get("tools") or [],
                whole=rendered,
                ids=plan.ids,
            )
        )

    def _thoughts(self) -> list[str]:
        messages = (step.reply.message for step in self._steps.values())
        return [message["reasoning"] for message in messages if message.get("reasoning")]


def _is_continued(step: RecordedReply, request: Mapping[str, Any], reply_at: int) -> bool:
    said = {"model": "m", "messages": [*step.request["messages"], step.reply.message]}
    recorded = CHAT.read(orjson.dumps(said), AROUND).request["messages"]
    return recorded == request["messages"][: reply_at + 1] and step.request.get("tools") == request.get("tools")


def _before(text: str, reply: Reply) -> str:
    """What a text has before the first words of its last message, the reply."""
    first = reply.message["content"] or reply.last
    return text[: text.rfind(first if first in text else reply.last)]


def _squeezed(text: str) -> str:
    """Without blanks and marks of thinking, which some templates put only at the end of a conversation."""
    return "".join(text.replace("<think>", "").replace("</think>", "").split())


def cut_short(reply: Reply) -> Reply:
    return replace(reply, finish_reason="length")
