"""Engines that write what a script says, and tell what they really were asked and really sampled."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.bridge_rig.public_templates import NotRendered, PublicTemplate
from benchmarks.bridge_rig.talk import Message, Reply
from benchmarks.bridge_rig.template_writer import TemplateWriter
from benchmarks.bridge_rig.tokenizing import Tokens
from benchmarks.exactness_rig.families import Family, template_of
from benchmarks.exactness_rig.scripted_model import ScriptedModel
from rig.fake_engine import FakeEngine
from rig.fake_engine.asking import RefusedError


@dataclass(frozen=True)
class Sampling:
    """One call, as the engine knows it."""

    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float]


class ObservedEngine(Protocol):
    @property
    def url(self) -> str: ...

    def say_next(self, history: Sequence[Message], tools: Sequence[Any], reply: Reply) -> None:
        """The reply to the next call, whose messages are these."""

    def served(self) -> Message:
        """The last reply, as the engine's parsers read its tokens."""

    def sampled(self) -> list[Sampling]:
        """The calls since this was asked last."""

    async def render(self, messages: Sequence[Message], tools: Sequence[Any]) -> list[int]:
        """The prompt that the engine makes of a whole conversation. NotRendered if it refuses it."""


class ObservedFake:
    """The fake engine with a public chat template and a real tokenizer."""

    def __init__(self, fake: FakeEngine, model: ScriptedModel) -> None:
        self._model = model
        self.fake = fake
        self._message: Message = {}

    @property
    def url(self) -> str:
        return self.fake.url

    def say_next(self, history: Sequence[Message], tools: Sequence[Any], reply: Reply) -> None:
        self._message = reply.message
        self.fake.replies.clear()
        self.fake.replies.append(self._model.reply(history, tools, reply))

    def served(self) -> Message:
        """Its parsers are scripted too."""
        return self._message

    def sampled(self) -> list[Sampling]:
        found = [
            Sampling(generation.ask.prompt_ids, output.ids, output.logprobs)
            for generation in self.fake.generations
            for output in generation.outputs
        ]
        self.fake.generations.clear()
        return found

    async def render(self, messages: Sequence[Message], tools: Sequence[Any]) -> list[int]:
        return list(self._model.tokens.encode(self._model.writer.template.render(messages, tools)).tolist())


@asynccontextmanager
async def observed_fake(family: Family) -> AsyncIterator[ObservedFake]:
    template = template_of(family)
    tokens = Tokens(family.tokenizer, template.controls)

    def encode(text: str) -> list[int]:
        return list(tokens.encode(text).tolist())

    rendering = as_engine_renders(template)
    async with FakeEngine(template=rendering, encode=encode, max_model_len=100_000) as engine:
        yield ObservedFake(engine, ScriptedModel(TemplateWriter(template, tokens)))


def as_engine_renders(template: PublicTemplate) -> Any:
    def render(messages: list[Message], tools: list[Any], add_generation_prompt: bool) -> str:
        try:
            return template.render(messages, tools, add_generation_prompt=add_generation_prompt)
        except NotRendered:
            raise RefusedError(400, "BadRequestError", "the chat template refuses these messages") from None

    return render
