"""Token ids to text, by a local tokenizer or by the engine itself."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from stepwell.engines.engine import EngineHttp, EngineKind

CONTROL_TOKENS = re.compile(r"<\|[^|<>]+\|>|</?s>")
"""How most models write control tokens. Only an untrained model puts them inside its text."""


@dataclass(frozen=True, slots=True)
class DecodedText:
    text: str
    end: str = ""
    """The text of the last token, if it may be a control token that the agent does not get: the end of the turn."""
    bare: str | None = None
    """The text without control tokens, if they may be anywhere in it."""


class Detokenizer(Protocol):
    async def decode(self, ids: Sequence[int]) -> DecodedText | None:
        """None if the ids cannot be decoded."""


class LocalDetokenizer:
    """A Hugging Face tokenizer; it skips control tokens, as an engine's answers do."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    async def decode(self, ids: Sequence[int]) -> DecodedText | None:
        return DecodedText(str(self._tokenizer.decode(ids, skip_special_tokens=True)))


class EngineDetokenizer:
    """The engine itself, which includes control tokens."""

    def __init__(self, kind: EngineKind, http: EngineHttp, model: str) -> None:
        self._kind = kind
        self._http = http
        self._model = model

    async def decode(self, ids: Sequence[int]) -> DecodedText | None:
        text, end = await self._ask(ids), await self._ask(ids[-1:])
        return None if text is None or end is None else DecodedText(text, end, CONTROL_TOKENS.sub("", text))

    async def _ask(self, ids: Sequence[int]) -> str | None:
        return await self._kind.detokenize(self._http, self._model, ids) if len(ids) else ""
