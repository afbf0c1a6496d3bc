"""Conversations read back from tokens or text, by the markers of chat templates.

Two families of templates are known: ChatML and the headers of Llama 3.

- `read_turns` reads tokens. Only a whole token is a marker: text that merely looks like a marker does not end a turn.
  Text outside of a turn is kept in a turn with the role "text", unless it is blank.
- `read_messages` reads text. A prompt of an unknown template is one message.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from stepwell.steps.prefix_tree import common_prefix
from stepwell.steps.step import IntArray, Step

ChatMessage: TypeAlias = dict[str, str]

ROLE_STARTS = {"<|im_start|>": "\n", "<|start_header_id|>": "<|end_header_id|>"}
"""The token before a role, and the text behind the role."""
SEPARATORS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|begin_of_text|>", "<|end_of_text|>")
TURN_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>"),
    *("<end_of_turn>", "<|end|>", "<eos>", "</s>"),
)
"""The texts of stop tokens."""
MARKERS = (*ROLE_STARTS, "<|end_header_id|>", *SEPARATORS)
MARKERS_IN_TEXT = "markers_in_text"
"""A key of a step's extras: a message of its prompt writes markers, so that turns cannot be told apart."""
NO_ROLE = "text"
ROLES = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    "developer": "system",
    "function": "tool",
    "ipython": "tool",
}
"""The role of a turn, by the name that a template gives it."""
CHATML = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(<\|im_end\|>|\Z)", re.DOTALL)
LLAMA_3 = re.compile(r"<\|start_header_id\|>(\w+)<\|end_header_id\|>\n\n(.*?)(<\|eot_id\|>|<\|eom_id\|>|\Z)", re.DOTALL)
TEMPLATES = (CHATML, LLAMA_3)


@dataclass(frozen=True, slots=True)
class ConversationTurn:
    role: str
    text: str
    is_response: bool = False


def shared_length(before: Step | None, prompt_ids: IntArray) -> int:
    """How many tokens a prompt has in common with the step before it, prompt and response."""
    return 0 if before is None else common_prefix(np.concatenate([before.prompt_ids, before.response_ids]), prompt_ids)


def read_turns(prompt: Sequence[str], response: Sequence[str]) -> list[ConversationTurn]:
    """The turns of the new part of a step's prompt, then those of its response, from the texts of the tokens.

    A response has several turns if it is a whole exchange.
    """
    answered = _split(response, "assistant") or [ConversationTurn("assistant", "")]
    return [*_split(prompt, NO_ROLE), *(ConversationTurn(turn.role, turn.text, is_response=True) for turn in answered)]


def read_messages(prompt: str, response: str, *, is_forgeable: bool = False) -> list[ChatMessage]:
    """The messages of a prompt, then the response: as a message of its own, or as the end of one that the prompt began.

    The response is not searched for markers; nor is the prompt if its messages wrote some themselves (`is_forgeable`).
    """
    for template in TEMPLATES if not is_forgeable else ():
        turns: list[tuple[str, str, str]] = template.findall(prompt)
        if turns:
            return _answered(turns, response)
    return [{"role": "prompt", "content": prompt}, {"role": "assistant", "content": response}]


def without_end(text: str) -> str:
    """The text without the marker that ends a turn."""
    for marker in TURN_ENDS:
        if text.endswith(marker):
            return text.removesuffix(marker)
    return text


def _answered(turns: list[tuple[str, str, str]], response: str) -> list[ChatMessage]:
    messages = [{"role": role, "content": content} for role, content, _ in turns]
    role, begun, end = turns[-1]
    if role == "assistant" and not end:
        messages[-1] = {"role": role, "content": begun + response}
    else:
        messages.append({"role": "assistant", "content": response})
    return messages


def _split(texts: Sequence[str], role: str) -> list[ConversationTurn]:
    turns: list[ConversationTurn] = []
    collected: list[str] = []
    role_end: str | None = None

    def close() -> None:
        text = "".join(collected)
        collected.clear()
        if text.strip():
            turns.append(ConversationTurn(role, text.lstrip("\n")))

    for text in texts:
        if text in ROLE_STARTS:
            close()
            role, role_end = NO_ROLE, ROLE_STARTS[text]
        elif text in SEPARATORS:
            close()
            role, role_end = NO_ROLE, None
        elif role_end is not None and role_end in text:
            head, _, rest = text.partition(role_end)
            name = "".join([*collected, head])
            collected.clear()
            role, role_end = ROLES.get(name.strip(), NO_ROLE), None
            collected.append(rest)
        else:
            collected.append(text)
    close()
    return turns
