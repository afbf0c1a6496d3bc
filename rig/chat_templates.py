"""Hand-made chat templates with the traits that make continuing a conversation difficult, and a tokenizer for them.

Each renders a conversation to text, in Python. The tokenizer knows control tokens, a few merges that cross the borders
of messages, and otherwise one id per character.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stepwell.gateway.bridge.recorded_turns import BridgeOutcome, CannotBridge

from stepwell.steps.step import IntArray, ids_array

Message = Mapping[str, Any]
Template = Callable[[Sequence[Message], Sequence[Any], bool], str]

CONTROL = (
    *("<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|header|>", "<|/header|>"),
    *("<|user|>", "<|assistant|>", "<|observation|>", "<|system|>", "<|start|>", "<|end|>", "<|return|>", "<|call|>"),
    *("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "</s>", "[TOOL_CALLS]", "[TOOL_RESULTS]", "<think>", "</think>"),
)
MERGES = ("\n\n", '"}', "}}", '": "', "\n<", "ok")
CONTROL_IDS = {text: number for number, text in enumerate(CONTROL)}
MERGE_IDS = {text: 100 + number for number, text in enumerate(MERGES)}
_CONTROL = re.compile("(" + "|".join(map(re.escape, CONTROL)) + ")")
_MERGED = re.compile("|".join(map(re.escape, MERGES)) + "|.", re.DOTALL)


def encode(text: str) -> IntArray:
    ids: list[int] = []
    for piece in _CONTROL.split(text):
        if piece in CONTROL_IDS:
            ids.append(CONTROL_IDS[piece])
        else:
            ids += (MERGE_IDS.get(merged, 1000 + ord(merged[0])) for merged in _MERGED.findall(piece))
    return ids_array(ids)


def decode(ids: Sequence[int]) -> str:
    return "".join(CONTROL[i] if i < 100 else MERGES[i - 100] if i < 1000 else chr(i - 1000) for i in ids)


def chatml(messages: Sequence[Message], tools: Sequence[Any], add_generation_prompt: bool) -> str:
    """Qwen 2.5: a newline after each end of turn; tool results are a user's turn."""
    text = f"<|im_start|>system\n{json.dumps(tools)}<|im_end|>\n" if tools else ""
    for place, message in enumerate(messages):
        if message["role"] == "tool":
            if messages[place - 1]["role"] != "tool":
                text += "<|im_start|>user"
            text += f"\n<tool_response>\n{_content(message)}\n</tool_response>"
            if place + 1 == len(messages) or messages[place + 1]["role"] != "tool":
                text += "<|im_end|>\n"
        else:
            text += f"<|im_start|>{message['role']}\n{_content(message)}{_tool_calls(message)}<|im_end|>\n"
    return text + ("<|im_start|>assistant\n" if add_generation_prompt else "")


def stripping(messages: Sequence[Message], tools: Sequence[Any], add_generation_prompt: bool) -> str:
    """Qwen 3: as ChatML, and thinking is shown only after the user's last message."""
    last_user = max((place for place, message in enumerate(messages) if message["role"] == "user"), default=-1)
    return chatml([_thinking(m, shown=at > last_user) for at, m in enumerate(messages)], tools, add_generation_prompt)


def keeping(messages: Sequence[Message], tools: Sequence[Any], add_generation_prompt: bool) -> str:
    """As ChatML, and all thinking is shown."""
    return chatml([_thinking(message, shown=True) for message in messages], tools, add_generation_prompt)


def headers(messages: Sequence[Message], tools: Sequence[Any], add_generation_prompt: bool) -> str:
    """Llama 3: headers, and contents without blanks at their ends."""
    text = f"<|header|>system<|/header|>\n\n{json.dumps(tools)}<|eot_id|>" if tools else ""
    for message in messages:
        role = "ipython" if message["role"] == "tool" else message["role"]
        text += f"<|header|>{role}<|/header|>\n\n{_content(message).strip()}{_tool_calls(message)}<|eot_id|>"
    return text + ("<|header|>assistant<|/header|>\n\n" if add_generation_prompt else "")


def openers(messages: Sequence[Message], tools: Sequence[Any], add_generation_prompt: bool) -> str:
    """GLM: messages have no end; a model stops with the opener of the next one."""
    names = {"tool": "<|observation|>", "user": "<|user|>", "assistant": "<|assistant|>", "system": "<|system|>"}
    text = f"<|system|>\n{json.dumps(tools)}" if tools else ""
    for message in messages:
        text += f"{names[message['role']]}\n{_content(message)}{_tool_calls(message)}"
    return text + ("<|assistant|>" if add_generation_prompt else "")


def channels(messages: Sequence[Message], tools: Sequence[Any], add_generation_prompt: bool) -> str:
    """Harmony: a final answer is sampled with <|return|> and shown with <|end|>; a call ends in <|call|>."""
    text = f"<|start|>developer{json.dumps(tools)}<|end|>" if tools else ""
    for message in messages:
        calls = message.get("tool_calls") or []
        if message["role"] == "tool":
            text += f"<|start|>functions to=assistant:{_content(message)}<|end|>"
        elif calls:
            text += (
                f"<|start|>assistant to={calls[-1]['function']['name']}:{calls[-1]['function']['arguments']}<|call|>"
            )
        else:
            text += f"<|start|>{message['role']}:{_content(message)}<|end|>"
    return text + ("<|start|>assistant" if add_generation_prompt else "")


def tools_last(messages: Sequence[Message], tools: Sequence[Any], add_generation_prompt: bool) -> str:
    """Mistral: the tools stand before the user's last message; there is no generation prompt."""
    last_user = max((place for place, message in enumerate(messages) if message["role"] == "user"), default=-1)
    text = ""
    for place, message in enumerate(messages):
        if message["role"] == "user":
            listed = f"[AVAILABLE_TOOLS]{json.dumps(tools)}" if tools and place == last_user else ""
            text += f"{listed}[INST]{_content(message)}[/INST]"
        elif message["role"] == "tool":
            text += f"[TOOL_RESULTS]{_content(message)}"
        elif message["role"] == "assistant":
            text += f"{_content(message)}{_tool_calls(message)}</s>"
        else:
            raise CannotBridge(BridgeOutcome.RENDER_FAILED)
    return text


def system_first(messages: Sequence[Message], tools: Sequence[Any], add_generation_prompt: bool) -> str:
    """As ChatML, and all system messages stand at the beginning."""
    ordered = sorted(messages, key=lambda message: message["role"] != "system")
    return chatml(ordered, tools, add_generation_prompt)


def no_calls(messages: Sequence[Message], tools: Sequence[Any], add_generation_prompt: bool) -> str:
    """As ChatML, and tool calls are not shown."""
    return chatml([{**message, "tool_calls": None} for message in messages], tools, add_generation_prompt)


TEMPLATES: Mapping[str, Template] = {
    template.__name__: template
    for template in (
        *(chatml, stripping, keeping, headers, openers),
        *(channels, tools_last, system_first, no_calls),
    )
}


def _content(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _thinking(message: Message, *, shown: bool) -> Message:
    """The message with its thinking in its content, or without."""
    if message["role"] != "assistant":
        return message
    thought, content = message.get("reasoning") or "", _content(message)
    if "</think>" in content:
        before, content = content.split("</think>", 1)
        thought, content = before.removeprefix("<think>").strip("\n"), content.lstrip("\n")
    return {**message, "content": f"<think>\n{thought}\n</think>\n\n{content}" if shown and thought else content}


def _tool_calls(message: Message) -> str:
    text = ""
    for call in message.get("tool_calls") or []:
        function = call["function"]
        arguments = json.dumps(json.loads(function["arguments"] or "{}"), ensure_ascii=False)
        text += f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {arguments}}}\n</tool_call>'
    return text
