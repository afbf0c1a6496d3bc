"""A prompt's text, read back into the messages it was made of.

Two families of chat templates are understood, ChatML and the headers of Llama 3; a prompt of another is one message.
"""

import re
from typing import TypeAlias

Message: TypeAlias = dict[str, str]

CHATML = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(<\|im_end\|>|\Z)", re.DOTALL)
LLAMA_3 = re.compile(r"<\|start_header_id\|>(\w+)<\|end_header_id\|>\n\n(.*?)(<\|eot_id\|>|<\|eom_id\|>|\Z)", re.DOTALL)
TEMPLATES = (CHATML, LLAMA_3)

TURN_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<end_of_turn>",
    "<|end|>",
    "<eos>",
    "</s>",
)
"""What the models' stop tokens are written as."""


def without_end(text: str) -> str:
    """The text without the mark that ends a turn."""
    for mark in TURN_ENDS:
        if text.endswith(mark):
            return text.removesuffix(mark)
    return text


def read_messages(prompt: str, response: str) -> list[Message]:
    """Only the prompt is read for marks; the response is one message, or the end of the one the prompt began."""
    for template in TEMPLATES:
        turns: list[tuple[str, str, str]] = template.findall(prompt)
        if turns:
            return _answered(turns, response)
    return [{"role": "prompt", "content": prompt}, {"role": "assistant", "content": response}]


def _answered(turns: list[tuple[str, str, str]], response: str) -> list[Message]:
    messages = [{"role": role, "content": content} for role, content, _ in turns]
    role, begun, end = turns[-1]
    if role == "assistant" and not end:
        messages[-1] = {"role": role, "content": begun + response}
    else:
        messages.append({"role": "assistant", "content": response})
    return messages
