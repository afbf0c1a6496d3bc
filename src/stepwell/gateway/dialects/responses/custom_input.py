"""The input of a custom tool. The model is offered a function and writes {"input": "..."}; the client gets the text.

- The text is decoded as it arrives, and does not depend on how the arguments are cut into pieces.
- Arguments that do not begin like that are the input as they are.
"""

import re

OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
OPENING_LENGTH = 64
"""Arguments whose first characters, so many, do not match are taken as they are."""
BODY = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
"""A JSON string up to its closing quote, or as far as it has arrived."""
ESCAPE = re.compile(
    r"\\(?:u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|(.))", re.DOTALL
)
LONGEST_ESCAPE = 12
"""Two halves of a character."""
LETTERS = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", '"': '"', "\\": "\\", "/": "/"}


class CustomInput:
    """Decodes one call's arguments."""

    __slots__ = ("_held", "_is_closed", "_is_inside", "_is_plain")

    def __init__(self) -> None:
        self._held = ""
        """The text that has arrived and is not decoded yet."""
        self._is_inside = False
        """Within the string."""
        self._is_plain = False
        self._is_closed = False

    def feed(self, piece: str) -> str:
        """The text that `piece` makes certain."""
        if self._is_plain:
            return piece
        if self._is_closed:
            return ""
        self._held += piece
        if not self._is_inside and not self._open():
            return self._release() if self._is_plain else ""
        return self._decode()

    def end(self) -> str:
        """The rest of arguments that have ended, whole or not."""
        if self._is_closed:
            return ""
        rest = self._release()
        return ESCAPE.sub(_unescape, rest) if self._is_inside else rest

    def _open(self) -> bool:
        opening = OPENING.match(self._held[:OPENING_LENGTH])
        if opening is not None:
            self._held, self._is_inside = self._held[opening.end() :], True
        elif len(self._held) >= OPENING_LENGTH:
            self._is_plain = True
        return self._is_inside

    def _decode(self) -> str:
        body = BODY.match(self._held)
        assert body is not None
        text, end = body.group(), body.end()
        if self._held[end : end + 1] == '"':
            self._is_closed, self._held = True, ""
        else:
            certain = _certain(text)
            text, self._held = text[:certain], self._held[certain:]
        return ESCAPE.sub(_unescape, text) if "\\" in text else text

    def _release(self) -> str:
        held, self._held = self._held, ""
        return held


def custom_input(arguments: str) -> str:
    """The input that whole arguments hold."""
    decoder = CustomInput()
    return decoder.feed(arguments) + decoder.end()


def _certain(text: str) -> int:
    """How many characters at the beginning mean the same whatever follows."""
    if "\\" in text[-LONGEST_ESCAPE:]:
        for escape in ESCAPE.finditer(text):
            if escape.start() > len(text) - LONGEST_ESCAPE:
                return escape.start()
    return len(text)


def _unescape(escape: re.Match[str]) -> str:
    high, low, code, letter = escape.groups()
    if high is not None:
        return chr(0x10000 + ((int(high, 16) - 0xD800) << 10) + int(low, 16) - 0xDC00)
    if code is not None:
        value = int(code, 16)
        return "\ufffd" if 0xD800 <= value <= 0xDFFF else chr(value)
    return LETTERS.get(letter, escape.group())
