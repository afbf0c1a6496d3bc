"""A model small enough to be made on the spot: Qwen2 with random weights and one token per byte.

No model can be downloaded where tests run. Written with numpy alone, so that Stepwell's environment needs no torch; the
same seed always gives byte-identical files.

    python -m rig.tiny_model FOLDER

Ids between the vocabulary's end and `PADDED_SIZE` exist only to make the matrices round, and no tokenizer knows them.
They are never sampled: hidden dimension 0 is a constant that no layer writes to, positive for every real token, and the
padded rows of the (tied) embedding weigh it strongly negative.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from rig.chatml import CHAT_TEMPLATE
from rig.vocabulary import CONTROL_TOKENS, END_OF_TEXT, END_OF_TURN, MARKER_TOKENS, VOCABULARY_SIZE

PADDED_SIZE, ROUND = 320, 64
HIDDEN = 128
INTERMEDIATE = 256
LAYERS = 2
HEADS = 4
KV_HEADS = 2
CONTEXT = 4096
SPREAD = 0.02
"""Standard deviation of every weight, the one transformers starts Qwen2 with."""

HEAD_SPREAD = 0.1
"""That of a classifier's head: wide enough to tell texts apart."""

REAL_MARK = 0.1
PADDING_MARK = -100.0

Array = NDArray[np.float32]


def make_tiny_model(
    folder: Path, *, seed: int = 0, context: int = CONTEXT, control_tokens: Sequence[str] = (), **tokenizer_config: Any
) -> Path:
    """Write a complete Hugging Face model folder and return it. `control_tokens` come after the vocabulary."""
    size = VOCABULARY_SIZE + len(control_tokens)
    padded = max(PADDED_SIZE, -(-size // ROUND) * ROUND)
    _write_folder(
        folder,
        _weights(seed, size, padded),
        _model_config() | {"vocab_size": padded, "max_position_embeddings": context},
    )
    if control_tokens:
        _tokenizer(control_tokens).save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", _tokenizer_config() | {"model_max_length": context} | tokenizer_config)
    _write(folder / "generation_config.json", {"eos_token_id": [END_OF_TURN], "pad_token_id": END_OF_TEXT})
    return folder


def make_tiny_classifier(folder: Path, *, seed: int = 0, labels: int = 1) -> Path:
    """The same model with a head that gives one number a label: with one label, a reward model."""
    head = np.random.default_rng(seed + 1).normal(0.0, HEAD_SPREAD, (labels, HIDDEN)).astype(np.float32)
    config = _model_config() | {
        "architectures": ["Qwen2ForSequenceClassification"],
        "id2label": {str(label): f"label {label}" for label in range(labels)},
        "label2id": {f"label {label}": label for label in range(labels)},
    }
    _write_folder(folder, _weights(seed) | {"score.weight": head}, config)
    return folder


def _write_folder(folder: Path, weights: dict[str, Array], config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _tokenizer().save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", _tokenizer_config())
    _write(folder / "config.json", config)


def _weights(seed: int, vocabulary: int = VOCABULARY_SIZE, padded: int = PADDED_SIZE) -> dict[str, Array]:
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> Array:
        return random.normal(0.0, SPREAD, shape).astype(np.float32)

    def norm() -> Array:
        return 1 + normal(HIDDEN)

    def writes_hidden(width: int) -> Array:
        matrix = normal(HIDDEN, width)
        matrix[0] = 0.0
        return matrix

    kv_width = HIDDEN * KV_HEADS // HEADS
    embedding = _embedding(normal(padded, HIDDEN), vocabulary)
    weights = {"model.embed_tokens.weight": embedding, "model.norm.weight": norm()}
    for layer in range(LAYERS):
        of_layer = {
            "input_layernorm.weight": norm(),
            "self_attn.q_proj.weight": normal(HIDDEN, HIDDEN),
            "self_attn.q_proj.bias": normal(HIDDEN),
            "self_attn.k_proj.weight": normal(kv_width, HIDDEN),
            "self_attn.k_proj.bias": normal(kv_width),
            "self_attn.v_proj.weight": normal(kv_width, HIDDEN),
            "self_attn.v_proj.bias": normal(kv_width),
            "self_attn.o_proj.weight": writes_hidden(HIDDEN),
            "post_attention_layernorm.weight": norm(),
            "mlp.gate_proj.weight": normal(INTERMEDIATE, HIDDEN),
            "mlp.up_proj.weight": normal(INTERMEDIATE, HIDDEN),
            "mlp.down_proj.weight": writes_hidden(INTERMEDIATE),
        }
        weights |= {f"model.layers.{layer}.{name}": array for name, array in of_layer.items()}
    return weights


def _embedding(rows: Array, vocabulary: int) -> Array:
    rows[:vocabulary, 0] = REAL_MARK
    rows[vocabulary:] = 0.0
    rows[vocabulary:, 0] = PADDING_MARK
    return rows


def _tokenizer(control_tokens: Sequence[str] = ()) -> Tokenizer:
    alphabet = _byte_characters()
    vocabulary = {character: byte for byte, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in MARKER_TOKENS])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control_tokens])
    return tokenizer


def _byte_characters() -> list[str]:
    """The character that stands for each byte: itself where printable, else the next free one from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    replaced = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + replaced.index(byte)) for byte in range(256)]


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _model_config() -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": PADDED_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "use_sliding_window": False,
        "torch_dtype": "float32",
        "eos_token_id": END_OF_TURN,
        "pad_token_id": END_OF_TEXT,
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    make_tiny_model(Path(sys.argv[1]))
