"""The demo's model, a Qwen2 with a third of a million parameters in float32, its tokenizer, and its supervised warm-up.

- Both are made without a download. The tokenizer has one id per byte, then the special tokens of chats.
- A conversation's prompt is a prefix of the prompt of its continuation, so a rollout of several calls is one row.
- The warm-up teaches the format of a task, with right and wrong answers. Reinforcement learning needs a model that is
  sometimes right, so the wrong answers are wrong copies (the right letters in another order, an operand instead of the
  result). With random wrong answers the model learned nothing.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer
    from transformers import Qwen2ForCausalLM

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
STEPS = 400
EXAMPLES = 64
"""Conversations per step, if they are short."""
RATE = 2e-3
WARMUP_STEPS = 20
"""Steps of the linear rise of the learning rate, which meanwhile decays to a tenth."""
IGNORED = -100
"""Label of a token without loss; torch's convention."""


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


def make_model(seed: int) -> "Qwen2ForCausalLM":
    """Equal seeds give equal weights."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=PADDED_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        architectures=["Qwen2ForCausalLM"],
        use_cache=False,
        eos_token_id=END_OF_TURN,
        pad_token_id=END_OF_TEXT,
    )
    return Qwen2ForCausalLM(config)  # type: ignore[no-untyped-call]


def write_model(model: "Qwen2ForCausalLM", folder: Path) -> Path:
    """Writes a complete Hugging Face folder."""
    from safetensors.torch import save_file

    write_tokenizer(folder)
    model.config.save_pretrained(folder)
    save_file(dict(model.named_parameters()), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def warm_up(
    model: "torch.nn.Module",
    conversations: Iterator[Sequence[ScriptTurn]],
    steps: int = STEPS,
    examples: int = EXAMPLES,
) -> float:
    """Trains the model on the assistant's turns of the conversations, so many per step; returns the last loss."""
    import torch

    tokenizer = make_tokenizer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(rate_factor, steps=steps))
    for _ in range(steps):
        ids, labels = _batch(tokenizer, list(islice(conversations, examples)))
        logits = model(input_ids=ids, attention_mask=(ids != END_OF_TEXT).long()).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return loss.item()


def rate_factor(step: int, steps: int) -> float:
    """The factor of the learning rate at step `step` of `steps`; it never reaches 0."""
    return min(1.0, (step + 1) / WARMUP_STEPS) * (1.0 - 0.9 * step / steps)


def _batch(
    tokenizer: "Tokenizer", conversations: Sequence[Sequence[ScriptTurn]]
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Ids and labels, padded on the right."""
    import torch

    rows = [row(tokenizer, conversation) for conversation in conversations]
    longest = max(len(ids) for ids, _ in rows)
    ids = [ids + [END_OF_TEXT] * (longest - len(ids)) for ids, _ in rows]
    labels = [labels + [IGNORED] * (longest - len(labels)) for _, labels in rows]
    return torch.tensor(ids), torch.tensor(labels)


def row(tokenizer: "Tokenizer", conversation: Sequence[ScriptTurn]) -> tuple[list[int], list[int]]:
    """Ids and labels of a conversation."""
    ids: list[int] = []
    labels: list[int] = []
    for turn in conversation:
        opening, content = (tokenizer.encode(text).ids for text in (turn.opening, turn.content))
        ids += opening + content
        labels += [IGNORED] * len(opening) + (content if turn.role == "assistant" else [IGNORED] * len(content))
    return ids, labels
