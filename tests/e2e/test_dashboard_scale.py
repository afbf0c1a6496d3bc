"""The dashboard's page over 100,000 trajectories, as long as a person waits for it: measured in the browser."""

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from tests.rig.browser import open_browser, open_page
from tests.rig.gateways import free_port
from tests.rig.waiting import answers, wait_until

TRAJECTORIES = 100_000
FIRST_PAINT = 2.0
FILTER = 1.0
TRIES = 3
"""The best of them counts: the machine may have other things to do."""

SHOWN_AFTER = """
([name, value]) => new Promise((done) => {
  const began = performance.now();
  const control = document.querySelector(`.filters [name=${name}]`);
  new PerformanceObserver((list) => {
    const mark = list.getEntries().find((entry) => String(entry.detail?.[name] ?? "") === value);
    if (mark) done((mark.startTime - began) / 1000);
  }).observe({ type: "mark" });
  control.value = value;
  control.dispatchEvent(new Event(control.localName === "select" ? "change" : "input"));
})
"""
"""Seconds from a change of a filter, the wait for more typing included, to the frame in which the rows are there."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "tests.rig.dashboard", "--port", str(port), "--trajectories", str(TRAJECTORIES)]
    process = subprocess.Popen(command)
    try:
        wait_until(lambda: answers(f"{url}/health"), "the dashboard", timeout=120)
        wait_until(lambda: known(url) >= TRAJECTORIES, "all trajectories to be known", timeout=120)
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


def test_the_list_is_painted_within_two_seconds(browser: Browser, url: str) -> None:
    took = [first_paint(browser, url) for _ in range(TRIES)]
    assert min(took) < FIRST_PAINT, took


def first_paint(browser: Browser, url: str) -> float:
    """Seconds from the beginning of the navigation, everything loaded anew, to the frame in which rows are there."""
    with open_page(browser, url) as (page, _):
        page.goto(f"{url}/#/trajectories")
        expect(page.locator("table.rows tbody tr")).to_have_count(100, timeout=30_000)
        return float(page.evaluate("performance.getEntriesByName('rows-shown')[0].startTime")) / 1000


@pytest.mark.parametrize(
    ("name", "value"),
    [("state", "dropped"), ("reward_min", "0.9"), ("exactness", "retokenized"), ("uid", "4711"), ("text", "sum is 12")],
)
def test_a_filter_takes_less_than_a_second(browser: Browser, url: str, name: str, value: str) -> None:
    with open_page(browser, url) as (page, faults):
        page.goto(f"{url}/#/trajectories")
        expect(page.locator("table.rows tbody tr")).to_have_count(100, timeout=30_000)
        took = []
        for _ in range(TRIES):
            took.append(float(page.evaluate(SHOWN_AFTER, [name, value])))
            page.evaluate(SHOWN_AFTER, [name, ""])
        assert min(took) < FILTER, took
        assert faults.none()
