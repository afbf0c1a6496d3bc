"""A chat template of the rig, as an engine renders it."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from rig.chat_templates import Template, encode
from stepwell.gateway.bridge.template_probes import FILLER, ChatMessage, stand_in_tools
from stepwell.steps.step import IntArray


@dataclass
class ScriptedRenderer:
    template: Template
    has_tools: bool = False
    rendered: list[list[ChatMessage]] = field(default_factory=list)
    """What was asked for."""

    @property
    def key(self) -> Hashable:
        return self.template, self.has_tools

    async def render(
        self,
        messages: Sequence[ChatMessage],
        reply: ChatMessage,
        *,
        add_generation_prompt: bool = True,
        filler: str = FILLER,
    ) -> IntArray:
        self.rendered.append(list(messages))
        tools = stand_in_tools(reply, filler) if self.has_tools else []
        return encode(self.template(messages, tools, add_generation_prompt))
