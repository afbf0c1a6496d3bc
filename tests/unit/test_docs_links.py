"""Links have targets, in the checkout and on the site; pages look the same on both."""

import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from rig.docs_pages import CHECKOUT, DOCS, FENCE, example_pages, headings, links, pages, slugs

names = [str(page.relative_to(CHECKOUT)) for page in [*pages(), *example_pages()]]
OUTSIDE = ("benchmarks", "docs", "rig", "scripts", "src", "tests")
"""Folders of the checkout; all other paths are below src/stepwell."""


@pytest.mark.parametrize("name", names)
def test_every_link_has_a_target(name: str) -> None:
    page = CHECKOUT / name
    for link in links(page):
        target = urlsplit(link)
        if target.scheme:
            assert target.scheme == "https", f"{link} is no https link"
            assert "." in target.netloc, link
            continue
        where = (page.parent / target.path).resolve() if target.path else page
        assert where.exists(), f"{link}: nothing is there"
        assert not where.is_relative_to(CHECKOUT / ".git")
        if page.is_relative_to(DOCS):
            assert where.is_relative_to(DOCS), f"{link} leaves the site; write the path as code"
            assert where.is_file(), f"{link} is a folder, which the site does not serve"
        if target.fragment:
            assert target.fragment in slugs(where), f"{link}: no such heading"


@pytest.mark.parametrize("name", names)
def test_lists_and_tables_begin_after_a_blank_line(name: str) -> None:
    """The forge does not need it, the site does."""
    text = FENCE.sub("", (CHECKOUT / name).read_text())
    for before, line in zip(text.splitlines(), text.splitlines()[1:], strict=False):
        begins = re.match(r"(- |\d+\. |\|)", line)
        if begins and before.strip() and not re.match(r"(- |\d+\. |\||  )", before):
            raise AssertionError(f"{name}: a blank line is missing before {line!r}")


def test_headings_of_a_page_have_different_anchors() -> None:
    for page in pages():
        texts = [text for _, text in headings(page)]
        repeated = {text for text in texts if texts.count(text) > 1}
        assert not repeated, f"{page.name}: {repeated}"


def test_every_page_is_on_the_site() -> None:
    nav = (CHECKOUT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    in_nav = {Path(path) for path in re.findall(r": ([\w/-]+\.md)$", nav, re.M)}
    decisions = {Path("decisions") / path for path in links(DOCS / "decisions" / "index.md")}
    there = {page.relative_to(DOCS) for page in DOCS.rglob("*.md")}
    assert there == in_nav | decisions
    assert yaml.safe_load((CHECKOUT / "mkdocs.yml").read_text())["strict"] is True


def test_every_decision_is_listed_under_its_title() -> None:
    index = (DOCS / "decisions" / "index.md").read_text()
    for page in DOCS.glob("decisions/0*.md"):
        title = headings(page)[0][1]
        assert f"]({page.name}) | {title} |" in index


@pytest.mark.parametrize("name", [name for name in names if "architecture" in name or "decisions" in name])
def test_every_module_that_is_named_exists(name: str) -> None:
    named = re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", (CHECKOUT / name).read_text())
    for path in named:
        base = CHECKOUT if path.split("/")[0] in OUTSIDE else CHECKOUT / "src" / "stepwell"
        assert "NAME" in path or (base / path).exists(), path
