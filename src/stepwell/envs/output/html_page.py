"""Groups as an HTML page, for people who read what their model wrote.

- Text of models, tools and datasets is escaped, and the page's Content-Security-Policy forbids scripts and anything
  from other servers.
- The page is written group by group, so its length costs no memory.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any, TextIO

from stepwell.common.tokenizers import Decode
from stepwell.envs.scored_data import UNTRAINED

HEAD = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark;
  --paper: #fff; --ink: #1d1d1f; --faint: #6b6b70; --line: #dcdce0; --trained: #d9f2dc; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --paper: #161618; --ink: #e6e6e8; --faint: #98989f; --line: #36363a; --trained: #1f4427; }}
}}
body {{ background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 60rem; padding: 0 1rem; }}
article {{ border-top: 1px solid var(--line); padding: .5rem 0 1rem; content-visibility: auto; }}
h2 {{ font-size: 1rem; margin: .5rem 0; }}
h2 small, summary small, .role, .legend {{ color: var(--faint); font-weight: normal; }}
summary {{ cursor: pointer; }}
pre {{ border-left: 3px solid var(--line); font: 13px/1.5 ui-monospace, monospace; margin: .3rem 0 .8rem;
  overflow-wrap: anywhere; padding-left: .8rem; unicode-bidi: isolate; white-space: pre-wrap; }}
mark {{ background: var(--trained); color: inherit; }}
</style>
<h1>{title}</h1>
<p class="legend">What is <mark>marked</mark> is trained.</p>
"""


class GroupPage:
    """Writes a page to a file, which the caller closes."""

    def __init__(self, file: TextIO, title: str, decode: Decode | None = None) -> None:
        self._file, self._decode, self._groups = file, decode, 0
        file.write(HEAD.format(title=escape(title)))

    def add(self, group: Mapping[str, Any]) -> None:
        self._groups += 1
        self._file.write(group_html(self._groups, group, self._decode))

    def close(self) -> None:
        self._file.write(f'<p class="legend">Groups: {self._groups}.</p>\n</html>\n')


def group_html(number: int, group: Mapping[str, Any], decode: Decode | None) -> str:
    scores = [float(score) for score in group["scores"]]
    spread = f"scores {min(scores):.4g} to {max(scores):.4g}, mean {sum(scores) / len(scores):.4g}" if scores else ""
    sequences = "".join(_sequence_html(group, k, decode) for k in range(len(scores)))
    return (
        f'<article id="g{number}"><h2>Group {number} <small>{len(scores)} sequences, {spread}</small></h2>\n'
        f"{sequences}</article>\n"
    )


def _sequence_html(group: Mapping[str, Any], k: int, decode: Decode | None) -> str:
    masks = group["masks"][k]
    trained = sum(int(mask) != UNTRAINED for mask in masks)
    counts = f"{len(masks)} tokens, {trained} trained"
    return (
        f"<details{' open' if k == 0 else ''}><summary>score {float(group['scores'][k]):.4g} "
        f"<small>{counts}</small></summary>\n{_content_html(group, k, decode)}</details>\n"
    )


def _content_html(group: Mapping[str, Any], k: int, decode: Decode | None) -> str:
    """The decoded tokens, else the messages, else the ids."""
    messages = group.get("messages")
    if decode is None and messages:
        return _messages_html(messages[k])
    return f"<pre>{_tokens_html(group['tokens'][k], group['masks'][k], decode or _as_numbers)}</pre>\n"


def _messages_html(messages: Any) -> str:
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return f"<pre>{escape(_as_text(messages))}</pre>\n"
    return "".join(_message_html(message) for message in messages)


def _message_html(message: Any) -> str:
    if not isinstance(message, Mapping):
        return f"<pre>{escape(_as_text(message))}</pre>\n"
    others = {key: value for key, value in message.items() if key not in ("role", "content") and value}
    shown = "\n".join(_as_text(part) for part in (message.get("content"), others) if part)
    return f'<div class="role">{escape(str(message.get("role", "")))}</div><pre>{escape(shown)}</pre>\n'


def _tokens_html(tokens: Sequence[int], masks: Sequence[int], decode: Decode) -> str:
    """Decodes runs of tokens, because a character may need several tokens."""
    return "".join(
        f"<mark>{escape(decode(run))}</mark>" if is_trained else escape(decode(run))
        for is_trained, run in _runs(tokens, masks)
    )


def _runs(tokens: Sequence[int], masks: Sequence[int]) -> Iterator[tuple[bool, list[int]]]:
    pairs = zip(tokens, masks, strict=True)
    for is_trained, run in groupby(pairs, key=lambda pair: int(pair[1]) != UNTRAINED):
        yield is_trained, [int(token) for token, _ in run]


def _as_numbers(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens)) + " "


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1, default=str)
