"""The site is built without warnings, needs no internet, and its reference follows the code."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rig.docs_pages import CHECKOUT, DOCS

PROGRAM = "import json, reference; print(json.dumps({name: page() for name, page in reference.PAGES.items()}))"


def test_the_reference_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=CHECKOUT / "scripts", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    written = json.loads(done.stdout.splitlines()[-1])
    there = {page.name: page.read_text() for page in (DOCS / "reference").iterdir()}
    assert there == written, "run scripts/reference.py"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=CHECKOUT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def test_nothing_on_the_site_is_fetched_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        text = page.read_text()
        loaded = re.findall(r"<(?:script|img|iframe|source)[^>]*\ssrc=[\"']?([^\"'\s>]+)", text)
        loaded += re.findall(
            r"<link[^>]*rel=[\"']?(?:stylesheet|preload|icon|preconnect)[^>]*href=[\"']?([^\"'\s>]+)", text
        )
        assert [url for url in loaded if re.match(r"(https?:)?//", url)] == [], page.name


def test_the_pictures_are_there_and_say_what_they_show(site: Path) -> None:
    pictures = list((site / "images").glob("*.svg"))
    assert {picture.stem for picture in pictures} >= {"call", "group", "staleness", "deaths"}
    for picture in pictures:
        text = picture.read_text()
        assert "<title" in text
        assert "<desc" in text
        assert "prefers-color-scheme: dark" in text
        assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
