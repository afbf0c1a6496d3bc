"""How a conversation becomes the text of a prompt, once as the tiny model's chat template and once in Python.

The fake engine renders without Jinja; a test holds the two to the same output. Turns are only ever appended: the prompt
of a conversation is a prefix of the prompt of its continuation, so an agent's steps can be stitched together.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

TOOLS_INTRODUCTION = 'Tools you may call as <tool_call>{"name": ..., "arguments": {...}}</tool_call>:'

CHAT_TEMPLATE = (
    """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n' }}
    {%- endif %}
    {{- 'INTRODUCTION\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.role == 'tool' %}
            {{- '<tool_response>' + message.content + '</tool_response>' }}
        {%- elif message.content %}
            {{- message.content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>{"name": ' + call.function.name | tojson + ', "arguments": ' }}
            {%- if call.function.arguments is string %}
                {{- call.function.arguments }}
            {%- else %}
                {{- call.function.arguments | tojson }}
            {%- endif %}
            {{- '}</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
).replace("INTRODUCTION", TOOLS_INTRODUCTION)

Message = Mapping[str, Any]


def render_chat(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), add_generation_prompt: bool = True
) -> str:
    """The prompt's text, ready for the assistant's next turn; what `CHAT_TEMPLATE` renders."""
    turns = [_turn(message) for message in messages]
    if tools:
        has_system = messages[0]["role"] == "system"
        system = _text(messages[0]) + "\n" if has_system else ""
        listed = "".join("\n" + _to_json(tool) for tool in tools)
        turns[: int(has_system)] = [
            f"<|im_start|>system\n{system}{TOOLS_INTRODUCTION}\n<tools>{listed}\n</tools><|im_end|>\n"
        ]
    return "".join(turns) + ("<|im_start|>assistant\n" if add_generation_prompt else "")


def render_call(name: str, arguments: str) -> str:
    """A tool call as the model writes it; `arguments` is JSON already."""
    return f'<tool_call>{{"name": {_to_json(name)}, "arguments": {arguments}}}</tool_call>'


def _turn(message: Message) -> str:
    text = _text(message)
    if message["role"] == "tool":
        text = f"<tool_response>{text}</tool_response>"
    for call in message.get("tool_calls") or []:
        arguments = call["function"]["arguments"]
        text += render_call(call["function"]["name"], _to_json(_parsed(arguments)))
    return f"<|im_start|>{message['role']}\n{text}<|im_end|>\n"


def _text(message: Message) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part.get("type") == "text")


def _parsed(arguments: Any) -> Any:
    """Arguments as an object: vLLM hands them to the template parsed, though the client sends a string."""
    return json.loads(arguments or "{}") if isinstance(arguments, str) else arguments


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
