"""The vocabulary that the tiny model and the fake engine share: one id per byte, then the added tokens.

A token's id is its byte, so ids can be written down and read by eye, no text is ever unknown, and what the fake engine
sends decodes with the tiny model's tokenizer. Text is brought to Unicode's NFC first, as transformers does for every
model of type Qwen2 whatever its tokenizer.json says: decomposed letters do not come back as they went in.
"""

import codecs
import re
import unicodedata

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Left out when a reply is decoded to text."""

MARKER_TOKENS = (
    "<think>",
    "</think>",
    "<tools>",
    "</tools>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
"""One token each, but part of the text: vLLM's parsers look for them there."""

ADDED_IDS = {token: 256 + i for i, token in enumerate(CONTROL_TOKENS + MARKER_TOKENS)}
VOCABULARY_SIZE = 256 + len(ADDED_IDS)
END_OF_TEXT = ADDED_IDS["<|endoftext|>"]
END_OF_TURN = ADDED_IDS["<|im_end|>"]

_ADDED_BYTES = {ADDED_IDS[token]: token.encode() for token in MARKER_TOKENS}
_CONTROL_NAMES = {ADDED_IDS[token]: token for token in CONTROL_TOKENS}
_ADDED_PATTERN = re.compile("(" + "|".join(re.escape(token) for token in ADDED_IDS) + ")")


def encode(text: str) -> list[int]:
    """The ids of a text, added tokens recognised wherever they stand."""
    ids: list[int] = []
    for piece in _ADDED_PATTERN.split(text):
        if piece in ADDED_IDS:
            ids.append(ADDED_IDS[piece])
        else:
            ids.extend(unicodedata.normalize("NFC", piece).encode())
    return ids


def pieces(ids: list[int]) -> list[str]:
    """The text that each token completes: nothing for control tokens and for the first bytes of a longer character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return [decoder.decode(bytes([token]) if token < 256 else _ADDED_BYTES.get(token, b"")) for token in ids]


def token_name(token: int, piece: str) -> str:
    """How vLLM names a token among the log-probabilities: control tokens too."""
    return piece or _CONTROL_NAMES.get(token, "")
