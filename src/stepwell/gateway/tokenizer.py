"""The tokenizer, loaded in a thread of its own so that the gateway serves at once. Recording never touches it."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from stepwell.errors import NotReady


class BackgroundTokenizer:
    def __init__(self, path: str, load: Callable[[str], Any]) -> None:
        self._path = path
        self._load = load
        self._tokenizer: Any = None
        self._why = f"still loading from {path}"

    def start(self) -> None:
        threading.Thread(target=self._run, name="tokenizer", daemon=True).start()

    def why_not_ready(self) -> str | None:
        return None if self._tokenizer is not None else self._why

    def decode(self, ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            raise NotReady(f"the tokenizer is not ready: {self._why}")
        return str(self._tokenizer.decode(ids))

    def _run(self) -> None:
        try:
            self._tokenizer = self._load(self._path)
        except Exception as failure:  # noqa: BLE001 - loaders raise anything; /ready must say it
            self._why = f"could not be loaded from {self._path}: {' '.join(str(failure).split())}"


def load_tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)
