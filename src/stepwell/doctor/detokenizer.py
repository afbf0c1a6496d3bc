"""What tokens spell: told by a local tokenizer, or by the engine itself."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp

from stepwell.engines.engine import BROKEN

DETOKENIZE = "/detokenize"
MARKS = re.compile(r"<\|[^|<>]+\|>|</?s>")
"""How most models write their control tokens. Only a model that was never trained puts them within its text."""


@dataclass(frozen=True, slots=True)
class Spelled:
    text: str
    end: str = ""
    """What the last token spells, where that may be a mark that the agent is not told: the end of the turn."""
    bare: str | None = None
    """The text without what looks like such marks, where they may be anywhere in it."""


class Speller(Protocol):
    async def spell(self, ids: Sequence[int]) -> Spelled | None:
        """None where it cannot be told."""


class LocalSpeller:
    """A Hugging Face tokenizer; control tokens spell nothing, as in an engine's answers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    async def spell(self, ids: Sequence[int]) -> Spelled | None:
        return Spelled(str(self._tokenizer.decode(ids, skip_special_tokens=True)))


class EngineSpeller:
    """vLLM's /detokenize, which spells control tokens too."""

    def __init__(self, http: aiohttp.ClientSession, engine: str, model: str) -> None:
        self._http = http
        self._url = engine + DETOKENIZE
        self._model = model

    async def spell(self, ids: Sequence[int]) -> Spelled | None:
        text, end = await self._ask(ids), await self._ask(ids[-1:])
        return None if text is None or end is None else Spelled(text, end, MARKS.sub("", text))

    async def _ask(self, ids: Sequence[int]) -> str | None:
        if not len(ids):
            return ""
        try:
            async with self._http.post(self._url, json={"model": self._model, "tokens": list(ids)}) as answer:
                told = (await answer.json()).get("prompt") if answer.status == 200 else None
        except (*BROKEN, ValueError, AttributeError):
            return None
        return told if isinstance(told, str) else None
