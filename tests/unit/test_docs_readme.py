"""README.zh.md follows README.md: the same sections, the same code, the same links."""

from pathlib import Path

from rig.docs_pages import CHECKOUT, FENCE, headings, links

README, CHINESE = CHECKOUT / "README.md", CHECKOUT / "README.zh.md"


def code(page: Path) -> list[tuple[str, str]]:
    """Without the drawing, whose words are translated."""
    return [(match["language"], match["code"]) for match in FENCE.finditer(page.read_text()) if match["language"]]


def test_both_have_the_same_sections() -> None:
    assert [level for level, _ in headings(CHINESE)] == [level for level, _ in headings(README)]


def test_both_have_the_same_code() -> None:
    assert code(CHINESE) == code(README)


def test_both_have_the_same_links() -> None:
    ours = [link for link in links(README) if link != CHINESE.name]
    theirs = [link for link in links(CHINESE) if link != README.name]
    assert sorted(theirs) == sorted(ours)


def test_each_points_to_the_other() -> None:
    assert CHINESE.name in links(README)
    assert README.name in links(CHINESE)


def test_it_is_chinese() -> None:
    text = FENCE.sub("", CHINESE.read_text())
    assert sum("一" <= letter <= "鿿" for letter in text) > 800
