"""Fenced blocks of Markdown, as models write them around code."""

import re

FENCE = re.compile(r"^[ \t]*(```+|~~~+)[ \t]*([^\s`]*)[^\n]*$", re.MULTILINE)


def last_block(text: str) -> str | None:
    """What the last closed fenced block holds; None if there is none."""
    last: str | None = None
    opened: re.Match[str] | None = None
    for fence in FENCE.finditer(text):
        if opened is None:
            opened = fence
        elif fence.group(1).startswith(opened.group(1)) and not fence.group(2):
            last, opened = text[opened.end() + 1 : fence.start()], None
    return last
