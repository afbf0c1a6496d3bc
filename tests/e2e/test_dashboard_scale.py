"""The dashboard's page over 20,000 trajectories does the same work as over 1,000: rows and bytes are counted.

How long a person waits is measured by `python -m benchmarks.dashboard`.
"""

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from playwright.sync_api import Browser, Page, expect

from rig.browser import open_browser, open_page
from rig.gateways import free_port
from rig.waiting import answers, wait_until

SMALL, LARGE = 1_000, 20_000
ROWS = 100
"""On a page of the list."""


@pytest.fixture(scope="module")
def urls() -> Iterator[dict[int, str]]:
    """By the number of trajectories."""
    with ExitStack() as stack:
        yield {size: stack.enter_context(dashboard(size)) for size in (SMALL, LARGE)}


@contextmanager
def dashboard(trajectories: int) -> Iterator[str]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "rig.dashboard", "--port", str(port), "--trajectories", str(trajectories)]
    process = subprocess.Popen(command)
    try:
        wait_until(lambda: answers(f"{url}/health"), "the dashboard", timeout=120)
        wait_until(lambda: known(url) >= trajectories, "all trajectories to be known", timeout=120)
        yield url
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


def known(url: str) -> int:
    with urllib.request.urlopen(f"{url}/api/status") as answer:
        return int(json.load(answer)["index"]["trajectories"])


def open_list(page: Page, url: str, fragment: str) -> tuple[int, int]:
    """Rows on the page, and the bytes that the server sent for them."""
    with page.expect_response(lambda response: "/api/trajectories" in response.url) as answer:
        page.goto(f"{url}/#/trajectories{fragment}")
    expect(page.locator(".found b")).not_to_be_empty()
    return page.locator("table.rows tbody tr").count(), len(answer.value.body())


@pytest.mark.parametrize(
    "fragment", ["", "?state=dropped", "?reward_min=0.5", "?exactness=engine&sort=-reward", "?channel=train&uid=7"]
)
def test_a_page_of_the_list_costs_the_same_with_any_number_of_trajectories(
    browser: Browser, urls: dict[int, str], fragment: str
) -> None:
    rows, nbytes = {}, {}
    for size, url in urls.items():
        with open_page(browser, url) as (page, faults):
            rows[size], nbytes[size] = open_list(page, url, fragment)
            assert faults.none()
    assert rows[LARGE] == ROWS
    assert 0 < rows[SMALL] <= ROWS
    assert nbytes[LARGE] / rows[LARGE] < 1.5 * nbytes[SMALL] / rows[SMALL]
