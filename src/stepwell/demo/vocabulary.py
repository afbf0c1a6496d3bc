"""The demo's tokenizer, made without a download: one id per byte, then the special tokens of chats.

- An id below 256 is a byte, so every text can be encoded.
- A conversation's prompt is a prefix of the prompt of its continuation, so a rollout of several calls is one row.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Skipped when a reply is decoded to text."""
MARKER_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Part of the text, where vLLM's tool parser looks for them."""
WORD_TOKENS = ("user\n", "assistant\n", "tool\n", '{"name": "', '", "arguments": {"', '": "', '"}}')
"""Frequent strings as one token each: a call of the calculator takes 17 tokens instead of 48."""
ADDED_TOKENS = (*CONTROL_TOKENS, *MARKER_TOKENS, *WORD_TOKENS)

END_OF_TEXT = 256 + ADDED_TOKENS.index("<|endoftext|>")
END_OF_TURN = 256 + ADDED_TOKENS.index("<|im_end|>")
PADDED_SIZE = 320
"""Rows of the embedding: a round number, with some unused ids."""
CONTEXT = 256

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'tool' %}
        {{- '<tool_response>' + message.content + '</tool_response>' }}
    {%- elif message.content %}
        {{- message.content }}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson }}
        {{- '}</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""It ignores the tools of a request: the model knows its only tool from the warm-up."""


@dataclass(frozen=True, slots=True)
class ScriptTurn:
    """One message of a conversation, in the format of the chat template."""

    role: str
    text: str

    @property
    def opening(self) -> str:
        return f"<|im_start|>{self.role}\n"

    @property
    def content(self) -> str:
        return f"{self.text}<|im_end|>"


def make_tokenizer() -> "Tokenizer":
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(_byte_letters())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in (*MARKER_TOKENS, *WORD_TOKENS)])
    return tokenizer


def write_tokenizer(folder: Path) -> None:
    """Writes the tokenizer files that vLLM and transformers expect in a model's folder."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _byte_letters() -> list[str]:
    """The letter of each byte: the byte itself if it is printable, else the next free code point from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    replaced = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + replaced.index(byte)) for byte in range(256)]
