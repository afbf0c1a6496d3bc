"""The chat templates that scripts/chat_templates.py fetches, rendered as vLLM renders them: by transformers, after the
messages were brought into the form that templates expect."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, tzinfo
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import orjson
from jinja2 import TemplateError
from transformers.utils import chat_template_utils

from stepwell.errors import EngineUnavailable

CHECKOUT = Path(__file__).resolve().parents[2]
BEGIN, END = "<s>", "</s>"
"""What templates get as `bos_token` and `eos_token`."""
SKIPPED = "_training"
"""Templates of trl whose name ends so render what another one renders, and mark what is trained in it."""
CONTROLS = re.compile(
    r"<\|[^<>|\s]{1,40}\|?>|<[^<>|\s{}]{1,40}\|>|<｜[^<>{}]{1,40}｜>|\[\|[^\[\]|]{1,20}\|\]|\[/?[A-Z_]{3,20}\]"
    r"|</?(?:think|tool_call|tool_response|start_of_turn|end_of_turn|seed:\w+|extra_id_\d+|SPECIAL_\d+)>"
    r"|\[e~\[|\]~b\]|<(?:start|end)_(?:of_turn|function_\w+)>|<\|\"\|>|<(?:eos|bos|sop|escape)>"
)
"""Texts in the source of a template that are one token each for its model."""
LOOPS_OVER_CONTENT = re.compile(r"for \w+ in (?:\w+\[['\"]content['\"]\]|\w+\.content|content)\b")
FAMILIES = (
    ("Qwen", ("qwen", "qwq", "mimo", "xlam_qwen")),
    ("DeepSeek", ("deepseek",)),
    ("Llama", ("llama3", "llama-3", "llama4", "functionary", "firefunction", "toolace", "xlam_llama", "hermes")),
    ("Mistral", ("mistral", "ministral", "pixtral", "devstral")),
    ("Gemma", ("gemma",)),
    ("GLM", ("glm",)),
    ("gpt-oss", ("gptoss", "gpt-oss")),
    ("Kimi", ("kimi",)),
    ("MiniMax", ("minimax",)),
    ("Nemotron", ("nemotron",)),
    ("Phi", ("phi",)),
    ("Cohere", ("cohere", "command", "aya")),
    ("Granite", ("granite",)),
    ("LFM", ("lfm",)),
)
OTHERS = "others"


class OneMoment(datetime):
    """Some templates show the date, and one of them the second: two renderings of the same must be the same."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> "OneMoment":
        return cls(2026, 11, 16, tzinfo=tz)


class NotRendered(EngineUnavailable):
    """The template refuses these messages, and so would an engine."""


@dataclass(frozen=True, eq=False)
class PublicTemplate:
    name: str
    """Its package and file."""
    source: str
    _rendered: dict[bytes, str | None] = field(default_factory=dict)

    @property
    def family(self) -> str:
        name = self.name.partition("/")[2].lower().removeprefix("tool_chat_template_")
        return next((family for family, words in FAMILIES if any(word in name for word in words)), OTHERS)

    @cached_property
    def controls(self) -> frozenset[str]:
        return frozenset([*CONTROLS.findall(self.source), BEGIN, END, "<|im_end|>"])

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], *, add_generation_prompt: bool = True
    ) -> str:
        """NotRendered if the template has no text for these messages."""
        key = orjson.dumps([messages, tools, add_generation_prompt])
        if key not in self._rendered:
            self._rendered[key] = self._render(json.loads(key))
        if (text := self._rendered[key]) is None:
            raise NotRendered(self.name)
        return text

    def _render(self, asked: list[Any]) -> str | None:
        messages, tools, add_generation_prompt = asked
        try:
            with patch.object(chat_template_utils, "datetime", OneMoment):
                rendered: Any = chat_template_utils.render_jinja_template(
                    [[self._as_vllm_gives_it(message) for message in messages]],
                    tools=tools or None,
                    chat_template=self.source,
                    add_generation_prompt=add_generation_prompt,
                    bos_token=BEGIN,
                    eos_token=END,
                )
        except (TemplateError, TypeError, KeyError, ValueError, AttributeError, IndexError):
            return None
        return str(rendered[0][0])

    def _as_vllm_gives_it(self, message: dict[str, Any]) -> dict[str, Any]:
        content = message.get("content") or []
        texts = [content] if isinstance(content, str) else [part["text"] for part in content]
        kept: dict[str, Any] = {name: message[name] for name in ("role", "tool_call_id", "name") if name in message}
        if self._wants_parts and message["role"] != "tool":
            kept["content"] = [{"type": "text", "text": text} for text in texts]
        else:
            kept["content"] = "\n".join(texts)
        if message.get("reasoning") is not None:
            kept |= {"reasoning": message["reasoning"], "reasoning_content": message["reasoning"]}
        if calls := message.get("tool_calls"):
            kept["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
        return kept

    @cached_property
    def _wants_parts(self) -> bool:
        """vLLM finds out in the same way, from the template's syntax tree."""
        return LOOPS_OVER_CONTENT.search(self.source) is not None


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    return {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"] or "{}")}}


@cache
def fetched() -> Path:
    """The folder with templates and tokenizers, which are fetched first where they are missing."""
    script = CHECKOUT / "scripts" / "chat_templates.py"
    done = subprocess.run([sys.executable, script], check=True, stdout=subprocess.PIPE, text=True)
    return Path(done.stdout.splitlines()[-1])


def public_templates() -> list[PublicTemplate]:
    """Each text once."""
    found: dict[str, PublicTemplate] = {}
    for path in sorted((fetched() / "templates").glob("*/*.jinja")):
        if not path.stem.endswith(SKIPPED):
            source = path.read_text()
            found.setdefault(source.strip(), PublicTemplate(f"{path.parent.name}/{path.stem}", source))
    return list(found.values())
