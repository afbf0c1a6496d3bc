"""A tokenizer.json as large as those of served models, whose memory counts."""

import json
from itertools import islice, product
from pathlib import Path
from string import ascii_letters, digits

SIZE = 150_000
LETTERS = ascii_letters + digits


def write_large_tokenizer(folder: Path, size: int = SIZE) -> None:
    """Byte pair encoding of letters, whose tokens have up to three of them."""
    merges = [*product(LETTERS, LETTERS), *((a + b, c) for a, b, c in product(LETTERS, LETTERS, LETTERS))]
    merges = list(islice(merges, size - len(LETTERS)))
    vocabulary = {token: number for number, token in enumerate([*LETTERS, *map("".join, merges)])}
    model = {"type": "BPE", "vocab": vocabulary, "merges": [" ".join(pair) for pair in merges]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
