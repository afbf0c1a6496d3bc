"""Conversations of any kind with any template: what is bridged is what the template would make, and every sampled token
is trained once, in a sequence that the engine had."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stepwell.gateway.bridge.recorded_turns import BridgeOutcome, CannotBridge, ThinkingPolicy

from rig.chat_templates import TEMPLATES, Template, decode, encode
from rig.local_pool import LocalPool
from stepwell.engines.fleet import EngineFleet
from stepwell.gateway.bridge.bridge import Bridge
from stepwell.gateway.recording.step_builder import PendingStep, PromptOrigin, build_steps
from stepwell.pool.api.producing import RecordedTurn, TrajectoryRef
from stepwell.steps.columns import pack
from stepwell.steps.rows import merge_rows
from stepwell.steps.step import IntArray, Step, logprobs_array
from stepwell.wire.openai import NO_USAGE, Sampled
from tests.unit.gateway.dialects.asking import chat

REF = TrajectoryRef("t", "p")
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
WORDS = st.text("ab \n{}\"'<", max_size=8)
ASKED = st.sampled_from(["hi", "<|im_end|>\n", "</s>[INST]", '{"a": 1}', "\n\n"])


@dataclass(frozen=True)
class Said:
    """One turn: what the model says, and what its agent does with it."""

    content: str
    reasoning: str
    calls: int
    drops_reasoning: bool
    edit: str
    answer: str
    adds: tuple[str, ...]
    """Roles of further messages."""
    goes_back: int
    """How many turns the agent takes back before its next call."""


SAID = st.builds(
    Said,
    content=WORDS,
    reasoning=st.sampled_from(["", "hm", "so\n\nso"]),
    calls=st.integers(0, 2),
    drops_reasoning=st.booleans(),
    edit=st.sampled_from(["", "", "", "", "", "!"]),
    answer=ASKED,
    adds=st.sampled_from([(), ("user",), ("user",), ("system", "user"), ("system",)]),
    goes_back=st.sampled_from([0, 0, 0, 0, 1]),
)

POLICIES = st.sampled_from([ThinkingPolicy.TEMPLATE, ThinkingPolicy.TEMPLATE, *ThinkingPolicy])


@dataclass
class TemplateEngine:
    """As much of a fleet as a bridge needs: it renders."""

    rendering: Template
    template: str = "the template"
    renders_chat: bool = True

    async def render(self, request: dict[str, Any], template: str) -> IntArray:
        gives_prompt = request.get("add_generation_prompt") is not False
        return encode(self.rendering(request["messages"], request.get("tools") or [], gives_prompt))


class EmptyPool(LocalPool):
    async def turns(self, trajectory_uid: str, prompt_uid: str, replied: str) -> list[RecordedTurn]:
        return []


@dataclass
class Talk:
    template: Template
    policy: ThinkingPolicy
    messages: list[dict[str, Any]] = field(default_factory=lambda: [{"role": "user", "content": "Hello?"}])
    steps: list[Step] = field(default_factory=list)
    outcomes: list[BridgeOutcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        engine = cast("EngineFleet", TemplateEngine(self.template))
        self.bridge = Bridge(engines=engine, pool=EmptyPool(), thinking=self.policy)

    async def turn(self, said: Said) -> None:
        call = chat(messages=self.messages, tools=TOOLS)
        plan = await self.bridge.plan(call, REF)
        assert plan is not None
        rendered = self.template(call.request["messages"], TOOLS, True)
        if plan.ids is not None and self.policy is ThinkingPolicy.TEMPLATE:
            assert decode(plan.ids.tolist()) == rendered
        prompt = encode(rendered) if plan.ids is None else plan.ids
        reply = message_of(said, len(self.steps))
        response = encode(sampled_text(self.template, call.request["messages"], reply))
        sampled = Sampled(prompt, response, logprobs_array([-1.0] * len(response)), "stop")
        plan.check_echo(prompt)
        origin = PromptOrigin(plan.prompt_made, self.bridge.conversation_digests(plan, [reply]))
        begun = PendingStep("t", "p", uid=f"step {len(self.steps)}")
        steps = build_steps(begun, [sampled], NO_USAGE, prompt_length=10**6, origin=origin)
        self.bridge.note(plan, steps)
        self.steps += steps
        self.outcomes.append(plan.outcome)
        self._continue(reply, said)

    def _continue(self, reply: dict[str, Any], said: Said) -> None:
        kept = json.loads(json.dumps(reply))
        if said.drops_reasoning:
            kept.pop("reasoning", None)
        kept["content"] = (kept["content"] or "") + said.edit
        if said.goes_back and len(self.messages) > 1:
            self.messages = [*self.messages[:-1], {"role": self.messages[-1]["role"], **self.messages[-1]}]
            if self.messages[-1]["role"] == "user":
                self.messages[-1] = {"role": "user", "content": said.answer}
            return
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": said.answer} for call in kept.get("tool_calls", [])
        ]
        adds = said.adds or (() if results else ("user",))
        self.messages = [*self.messages, kept, *results, *({"role": role, "content": said.answer} for role in adds)]


def message_of(said: Said, number: int) -> dict[str, Any]:
    calls = [
        {"id": f"call{number:04}{place}", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
        for place in range(said.calls)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": said.content}
    if said.reasoning:
        message["reasoning"] = said.reasoning
    return {**message, "tool_calls": calls} if calls else message


def sampled_text(template: Template, messages: list[dict[str, Any]], reply: dict[str, Any]) -> str:
    """What a model writes that has learned its template."""
    prompt, whole = template(messages, TOOLS, True), template([*messages, reply], TOOLS, False)
    text = whole.removeprefix(prompt) if whole.startswith(prompt) else reply["content"]
    name = template.__name__
    if name == "openers":
        return text + ("<|observation|>" if reply.get("tool_calls") else "<|user|>")
    if name == "channels":
        return text if text.endswith("<|call|>") else text.removesuffix("<|end|>") + "<|return|>"
    stop = {"headers": "<|eot_id|>", "tools_last": "</s>"}.get(name, "<|im_end|>")
    return text.rstrip("\n").removesuffix(stop) + stop


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=50, deadline=None)
@given(policy=POLICIES, turns=st.lists(SAID, min_size=2, max_size=6))
def test_a_bridge_is_what_the_template_would_make_and_each_token_is_trained_once(
    name: str, policy: ThinkingPolicy, turns: list[Said]
) -> None:
    talk = Talk(TEMPLATES[name], policy)

    async def run() -> None:
        for said in turns:
            try:
                await talk.turn(said)
            except CannotBridge:  # the template itself refuses the messages, so the engine does too
                return

    asyncio.run(run())
    if not talk.steps:
        return
    assert BridgeOutcome.FAILED not in talk.outcomes
    for step in talk.steps:
        assert step.quarantine is None
    rows = merge_rows(pack(talk.steps), np.zeros(len(talk.steps), np.int64), np.zeros(1, np.int64))
    had = {(*step.prompt_ids.tolist(), *step.response_ids.tolist()) for step in talk.steps}
    for start, end in zip(rows.offsets_R[:-1], rows.offsets_R[1:], strict=True):
        assert tuple(rows.tokens[start:end].tolist()) in had
    assert int(rows.loss_mask.sum()) == sum(len(step.response_ids) for step in talk.steps)


def test_a_conversation_without_thinking_is_bridged_in_every_turn() -> None:
    talk = Talk(TEMPLATES["chatml"], ThinkingPolicy.TEMPLATE)
    plain = Said("It is 4.", "", 0, drops_reasoning=False, edit="", answer="hi", adds=("user",), goes_back=0)
    asyncio.run(_all(talk, [plain] * 5))
    assert talk.outcomes == [BridgeOutcome.FIRST_TURN, *[BridgeOutcome.BRIDGED] * 4]


async def _all(talk: Talk, turns: list[Said]) -> None:
    for said in turns:
        await talk.turn(said)
