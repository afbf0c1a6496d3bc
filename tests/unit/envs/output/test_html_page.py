"""Pages are read by people, and hold text that nobody vouches for."""

import io
from html.parser import HTMLParser
from typing import Any

import pytest
from stepwell.envs.group_files import GroupPage

from stepwell.common.tokenizers import Decode

NASTY = """<script>alert("x")</script>' onload='&amp;</pre><img src=//evil.example>"""


class Seen(HTMLParser):
    """What a browser makes of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def group(**more: Any) -> dict[str, Any]:
    return {"tokens": [[1, 2, 3], [1, 4]], "masks": [[-100, 2, 3], [-100, 4]], "scores": [1.0, 0.25], **more}


def page_of(*groups: dict[str, Any], title: str = "t", decode: Decode | None = None) -> str:
    file = io.StringIO()
    page = GroupPage(file, title, decode)
    for each in groups:
        page.add(each)
    page.close()
    return file.getvalue()


def seen(page: str) -> Seen:
    parser = Seen()
    parser.feed(page)
    parser.close()
    return parser


@pytest.mark.parametrize(
    "page",
    [
        page_of(
            group(messages=[[{"role": NASTY, "content": NASTY}], [{"role": "user", "content": [{"text": NASTY}]}]])
        ),
        page_of(group(messages=[NASTY, [NASTY]])),
        page_of(group(messages=[[{"role": "a", "content": None, "tool_calls": [{NASTY: NASTY}]}], []])),
        page_of(group(), decode=lambda _: NASTY),
        page_of(group(), title=NASTY),
    ],
    ids=["messages", "odd messages", "tool calls", "tokens", "title"],
)
def test_what_a_model_wrote_is_shown_and_never_obeyed(page: str) -> None:
    browser = seen(page)
    assert {"script", "img"}.isdisjoint(browser.tags)
    assert all(not name.startswith("on") and name != "src" for name, _ in browser.attributes)
    assert "alert" in browser.text
    assert "evil.example" in browser.text


def test_the_page_forbids_scripts_and_loads_nothing() -> None:
    page = page_of(group())
    assert """content="default-src 'none'; style-src 'unsafe-inline'">""" in page
    assert "http://" not in page
    assert "https://" not in page


def test_trained_tokens_are_marked_run_by_run() -> None:
    page = page_of(group(), decode=lambda ids: "".join(chr(96 + i) for i in ids))
    assert "<pre>a<mark>bc</mark></pre>" in page
    assert "<pre>a<mark>d</mark></pre>" in page


def test_without_a_tokenizer_messages_are_shown_and_without_messages_ids() -> None:
    told = page_of(group(messages=[[{"role": "user", "content": "2+2?"}], []]))
    assert '<div class="role">user</div><pre>2+2?</pre>' in told
    assert "<pre>1 <mark>2 3 </mark></pre>" in page_of(group())


def test_scores_and_counts_stand_above_the_text() -> None:
    text = seen(page_of(group(), group())).text
    assert "Group 1 2 sequences, scores 0.25 to 1, mean 0.625" in text
    assert "score 0.25 2 tokens, 1 trained" in text
    assert "Groups: 2." in text


def test_it_is_readable_by_day_and_by_night() -> None:
    assert "color-scheme: light dark" in page_of()
    assert "@media (prefers-color-scheme: dark)" in page_of()
