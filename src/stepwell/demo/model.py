"""The demo's model: a Qwen2 of a third of a million parameters, in float32, so that vLLM and torch agree to 1e-4."""

from pathlib import Path
from typing import TYPE_CHECKING

from stepwell.demo.vocabulary import CONTEXT, END_OF_TEXT, END_OF_TURN, PADDED_SIZE, write_tokenizer

if TYPE_CHECKING:
    from transformers import Qwen2ForCausalLM


def make_model(seed: int) -> "Qwen2ForCausalLM":
    """The same seed always gives the same weights."""
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
    """A complete Hugging Face folder."""
    from safetensors.torch import save_file

    write_tokenizer(folder)
    model.config.save_pretrained(folder)
    save_file(dict(model.named_parameters()), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
