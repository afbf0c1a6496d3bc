"""Token ids as text, as the engine wrote them."""

from pathlib import Path

from stepwell.errors import BadRequest
from stepwell.rewards.sample import Decode, no_tokenizer


def load_decode(path: str | None) -> Decode:
    """A folder's tokenizer.json is read without transformers, whose import takes a child longer than all the rest."""
    if path is None:
        return no_tokenizer
    file = Path(path, "tokenizer.json")
    try:
        return _fast(file) if file.is_file() else _any(path)
    except Exception as failure:
        raise BadRequest(f"no tokenizer could be loaded from {path}: {failure}") from failure


def _fast(file: Path) -> Decode:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))


def _any(path: str) -> Decode:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    return lambda ids: str(tokenizer.decode(ids))
