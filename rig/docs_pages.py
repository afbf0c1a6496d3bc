"""The repository's pages: their fenced blocks, their headings and links, and the commands in them."""

import re
import shlex
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]
DOCS = CHECKOUT / "docs"
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<code>.*?)^(?P=indent)```$", re.M | re.S)
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")
REDIRECTS = frozenset((">", ">>"))
OPERATORS = REDIRECTS | {"&", "&&", "|", "||", ";"}


def pages() -> list[Path]:
    ours = ("README.md", "README.zh.md", "CONTRIBUTING.md")
    return [*(CHECKOUT / name for name in ours), *sorted(DOCS.rglob("*.md"))]


def files_of_tests() -> list[Path]:
    return [file for folder in ("tests", "benchmarks/tests") for file in (CHECKOUT / folder).rglob("test_*.py")]


def example_pages() -> list[Path]:
    """Their commands are run by tests/examples."""
    return sorted((CHECKOUT / "examples").rglob("README.md"))


@dataclass(frozen=True)
class Block:
    page: Path
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(CHECKOUT)}: {self.code[:200]}"


def blocks(page: Path, language: str) -> list[Block]:
    found = [match for match in FENCE.finditer(page.read_text()) if match["language"] == language]
    return [Block(page, language, re.sub(f"^{match['indent']}", "", match["code"], flags=re.M)) for match in found]


def rows(page: Path, heading: str) -> list[list[str]]:
    """The cells of a section's table, without its head."""
    section = page.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def prose(page: Path) -> str:
    """Without the fenced blocks."""
    return FENCE.sub("", page.read_text())


def headings(page: Path) -> list[tuple[int, str]]:
    return [(len(marks), text) for marks, text in re.findall(r"^(#+) (.*)$", prose(page), re.M)]


def slugs(page: Path) -> set[str]:
    """The anchors of a page's headings, where the site and the forge make the same of them."""
    return {_site_slug(text) for _, text in headings(page) if _site_slug(text) == _forge_slug(text)}


def _site_slug(text: str) -> str:
    plain = unicodedata.normalize("NFKD", _unmarked(text)).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def _forge_slug(text: str) -> str:
    return re.sub(r"[^\w\s-]", "", _unmarked(text).strip().lower()).replace(" ", "-")


def _unmarked(text: str) -> str:
    return re.sub(r"[`*]", "", re.sub(LINK, "", text))


def links(page: Path) -> list[str]:
    return LINK.findall(re.sub(r"`[^`\n]*`", "", prose(page)))


@dataclass(frozen=True)
class Command:
    """One simple command of a shell block: what stands before it in its environment, and its words."""

    env: dict[str, str]
    words: tuple[str, ...]


def commands(shell: str) -> Iterator[Command]:
    """Every simple command in a block, substitutions replaced by a word."""
    text = re.sub(r"\\\n", " ", shell)
    for line in _lines(text):
        lexer = shlex.shlex(_substituted(line), posix=True, punctuation_chars="&|;>")
        lexer.whitespace_split = True
        for words in _simple(list(lexer)):
            yield _command(words)


def _simple(words: list[str]) -> Iterator[list[str]]:
    """Cut at operators, without what is written to."""
    kept: list[str] = []
    for before, word in zip(["", *words], [*words, ";"], strict=True):
        if word not in OPERATORS and before not in REDIRECTS:
            kept.append(word)
        elif word in OPERATORS - REDIRECTS and kept:
            yield kept
            kept = []


def _lines(text: str) -> Iterator[str]:
    """Lines, joined where a quote goes on over several."""
    waiting = ""
    for line in text.splitlines():
        waiting = f"{waiting}\n{line}" if waiting else line
        if waiting.replace("\\'", "").count("'") % 2 == 0:
            yield re.sub(r"(^|\s)#.*$", "", waiting, flags=re.M)
            waiting = ""


def _substituted(line: str) -> str:
    return re.sub(r"\$\w+|\$\{\w+\}", "given", re.sub(r"\$\((?:[^()]|\([^()]*\))*\)", "given", line))


def _command(words: list[str]) -> Command:
    env: dict[str, str] = {}
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        name, _, value = words[0].partition("=")
        env[name] = value
        words = words[1:]
    return Command(env, tuple(words))
