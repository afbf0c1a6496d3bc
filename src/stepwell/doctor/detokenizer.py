"""Token ids to text, by a local tokenizer or by the engine itself."""

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

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


Decode: TypeAlias = Callable[[Sequence[int]], Awaitable[DecodedText | None]]
"""None if the ids cannot be decoded."""


def decode_by_tokenizer(tokenizer: Any) -> Decode:
    """A Hugging Face tokenizer skips control tokens, as an engine's answers do."""

    async def decode(ids: Sequence[int]) -> DecodedText | None:
        return DecodedText(str(tokenizer.decode(ids, skip_special_tokens=True)))

    return decode


def decode_by_engine(kind: EngineKind, http: EngineHttp, model: str) -> Decode:
    """The engine itself includes control tokens."""

    async def ask(ids: Sequence[int]) -> str | None:
        return await kind.detokenize(http, model, ids) if len(ids) else ""

    async def decode(ids: Sequence[int]) -> DecodedText | None:
        text, end = await ask(ids), await ask(ids[-1:])
        return None if text is None or end is None else DecodedText(text, end, CONTROL_TOKENS.sub("", text))

    return decode
