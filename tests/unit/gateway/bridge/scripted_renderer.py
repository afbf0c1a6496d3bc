"""A chat template of the rig, as an engine renders it."""

from collections.abc import Hashable, Sequence

from rig.chat_templates import Template, encode
from stepwell.gateway.bridge.template_probes import FILLER, ChatMessage, EngineRenderer, stand_in_tools
from stepwell.steps.step import IntArray


class ScriptedRenderer(EngineRenderer):
    def __init__(self, chat_template: Template, *, has_tools: bool = False) -> None:
        self.chat_template = chat_template
        self.has_tools = has_tools
        self.rendered: list[list[ChatMessage]] = []
        """What was asked for."""

    @property
    def key(self) -> Hashable:
        return self.chat_template, self.has_tools

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
        return encode(self.chat_template(messages, tools, add_generation_prompt))
