"""Tokenizers: loaded once per path or in the background, and token ids shown as text.

- A text that is decoded here keeps its special tokens.
- The texts of single tokens, joined, are the text of the whole sequence. A token that holds only some bytes of a
  character has an empty text; the last token of the character has the character.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from stepwell.common.own_process import release_freed_memory
from stepwell.errors import BadRequest, NotReady

TOKENIZER_FILE = "tokenizer.json"
BROKEN = "\N{REPLACEMENT CHARACTER}"
MAX_TOKENS_PER_CHARACTER = 4
NO_TOKENIZER = "there is no tokenizer here; give --tokenizer-path to see texts"

Decode: TypeAlias = Callable[[list[int]], str]


class Tokenizer(Protocol):
    def start(self) -> None:
        """Begin to load."""

    def why_not_ready(self) -> str | None: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class BackgroundTokenizer:
    """A tokenizer that is loaded in its own thread, so that a server can serve at once."""

    def __init__(self, path: str, load: Callable[[str], Any]) -> None:
        self._path = path
        self._load = load
        self._tokenizer: Any = None
        self._why = f"still loading from {path}"

    def start(self) -> None:
        threading.Thread(target=self._run, name="tokenizer", daemon=True).start()

    def why_not_ready(self) -> str | None:
        return None if self._tokenizer is not None else self._why

    def encoder(self) -> Any:
        """The Hugging Face tokenizer. The first call may take seconds. NotReady or BadRequest if there is none."""
        loaded = self._loaded
        return loaded.encoder() if isinstance(loaded, OnDemandTokenizer) else loaded

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._loaded.decode(ids))

    @property
    def _loaded(self) -> Any:
        if self._tokenizer is None:
            raise NotReady(f"the tokenizer is not ready: {self._why}")
        return self._tokenizer

    def _run(self) -> None:
        try:
            self._tokenizer = self._load(self._path)
        except Exception as failure:  # noqa: BLE001 - loaders raise anything; /ready shows the text
            self._why = _one_line(failure)


class LoadedTokenizer:
    """The part of a tokenizer that finds texts in tokens. A tokenizer.json is read without transformers."""

    def __init__(self, decode: Decode, special_ids: frozenset[int], id_of: Callable[[str], int | None]) -> None:
        self.special_ids = special_ids
        """The ids of tokens that are no text, such as the ends of turns."""
        self.id_of = id_of
        """The id of a token by its own text; None if there is no such token."""
        self._decode = decode

    def start(self) -> None: ...

    def why_not_ready(self) -> str | None:
        return None

    def decode(self, ids: Sequence[int]) -> str:
        return self._decode(list(ids))

    @classmethod
    def load(cls, path: str) -> "LoadedTokenizer":
        """BadRequest says why there is none."""
        if (file := _find_file(path)) is None:
            return cls.of_transformers(load_tokenizer(path))
        fast = _read_fast(file)
        special = [number for number, token in fast.get_added_tokens_decoder().items() if token.special]
        return cls(_decode_with(fast), frozenset(special), fast.token_to_id)

    @classmethod
    def of_transformers(cls, tokenizer: Any) -> "LoadedTokenizer":
        special = [number for number, token in tokenizer.added_tokens_decoder.items() if token.special]
        return cls(
            lambda ids: str(tokenizer.decode(ids, clean_up_tokenization_spaces=False)),
            frozenset(map(int, (*special, *tokenizer.all_special_ids))),
            tokenizer.get_vocab().get,
        )


class OnDemandTokenizer:
    """A tokenizer of a tokenizer.json, which is enough to decode. It is loaded on first use, and so is transformers,
    which encodes: both take much memory, and most servers need neither."""

    def __init__(self, path: str, file: Path) -> None:
        self._path = path
        self._file = file
        self._lock = threading.Lock()
        self._decode: Decode | None = None
        self._encoder: Any = None

    def decode(self, ids: Sequence[int]) -> str:
        """The first call may take a second."""
        with self._lock:
            if self._decode is None:
                self._decode = _decode_with(_read_fast(self._file))
                release_freed_memory()
        return self._decode(list(ids))

    def encoder(self) -> Any:
        """The Hugging Face tokenizer; BadRequest says why there is none."""
        with self._lock:
            if self._encoder is None:
                self._encoder = load_tokenizer(self._path)
                release_freed_memory()
            return self._encoder

    @classmethod
    def load(cls, path: str) -> Any:
        """Checks that the file can be read, and keeps nothing of it. Where there is no tokenizer.json, transformers'
        own. BadRequest says why there is none."""
        if (file := _find_file(path)) is None:
            return load_tokenizer(path)
        _read_fast(file)
        release_freed_memory()
        return cls(path, file)


class TokenDecoder:
    """Token ids as text: a whole sequence, or one text per token."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._text_of_token: dict[int, str] = {}

    def start(self) -> None:
        if self._tokenizer is not None:
            self._tokenizer.start()

    def why_not(self) -> str:
        """Why there are no texts; empty if there are."""
        return NO_TOKENIZER if self._tokenizer is None else self._tokenizer.why_not_ready() or ""

    def text(self, ids: Sequence[int]) -> str:
        assert self._tokenizer is not None
        return self._tokenizer.decode(ids) if ids else ""

    def texts(self, ids: Sequence[int]) -> list[str]:
        """One text per token. Most tokens have the same text everywhere, so each is decoded alone first. If the
        joined texts differ from the whole, each token gets what it adds to the tokens before it."""
        texts = list(self._decode_each_alone(ids))
        return texts if "".join(texts) == self.text(ids) else list(self._decode_each_in_context(ids))

    def _decode_each_alone(self, ids: Sequence[int]) -> Iterator[str]:
        """A sequence that ends inside a character yields less than the whole; `texts` then decodes in context."""
        broken: list[int] = []
        for token in ids:
            piece = self._token_text(token)
            broken.append(token)
            if len(broken) > 1 or BROKEN in piece:
                piece = self.text(broken)
                if BROKEN in piece and len(broken) < MAX_TOKENS_PER_CHARACTER:
                    yield ""
                    continue
            broken.clear()
            yield piece

    def _decode_each_in_context(self, ids: Sequence[int]) -> Iterator[str]:
        start = read = 0
        for end in range(1, len(ids) + 1):
            before, now = self.text(ids[start:read]), self.text(ids[start:end])
            if (now.endswith(BROKEN) and end < len(ids)) or len(now) <= len(before):
                yield ""
            else:
                yield now[len(before) :]
                start, read = read, end

    def _token_text(self, token: int) -> str:
        text = self._text_of_token.get(token)
        if text is None:
            text = self._text_of_token[token] = self.text([token])
        return text


def load_tokenizer(path: str) -> Any:
    """The Hugging Face tokenizer of a folder or a model name; BadRequest says why there is none."""
    if _is_folder_name(path) and not Path(path).is_dir():  # known without transformers, which takes seconds to import
        raise BadRequest(f"no tokenizer could be loaded from {path}: there is no such folder")
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(path)
    except Exception as failure:  # noqa: BLE001 - loaders raise anything
        raise BadRequest(f"no tokenizer could be loaded from {path}: {_one_line(failure)}") from None


def _is_folder_name(path: str) -> bool:
    """The name of a model has at most one slash."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1


def load_decode(path: str | None) -> Decode:
    """The decoding of a tokenizer. A tokenizer.json is read without transformers, because that import takes a child
    process longer than everything else."""
    if path is None:
        return no_tokenizer
    if (file := _find_file(path)) is None:
        tokenizer = load_tokenizer(path)
        return lambda ids: str(tokenizer.decode(ids))
    return _decode_with(_read_fast(file))


def _decode_with(fast: Any) -> Decode:
    return lambda ids: str(fast.decode(ids, skip_special_tokens=False))


def _find_file(path: str) -> Path | None:
    """The tokenizer.json of a folder, or of a model by its name, from the hub or its cache on this machine. None if
    there is none; transformers then says why, or finds other files."""
    if Path(path).is_dir() or _is_folder_name(path):
        file = Path(path, TOKENIZER_FILE)
        return file if file.is_file() else None
    try:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(path, TOKENIZER_FILE))
    except Exception:  # noqa: BLE001 - loaders raise anything
        return None


def _read_fast(file: Path) -> Any:
    try:
        from tokenizers import Tokenizer as FastTokenizer

        return FastTokenizer.from_file(str(file))
    except Exception as failure:
        raise BadRequest(f"no tokenizer could be loaded from {file.parent}: {_one_line(failure)}") from failure


def no_tokenizer(ids: list[int]) -> str:
    """The Decode of a worker that was given none."""
    raise NotReady(f"{len(ids)} tokens cannot be shown as text: the worker has no tokenizer; give --tokenizer-path")


def _one_line(failure: Exception) -> str:
    return " ".join(str(failure).split())
