"""Takes the pictures of docs/dashboard.md from a real run: vLLM, agents, and a model that learns.

    python -m scripts.screenshots [PORT_OF_A_RUNNING_DASHBOARD]

Without a port it starts the demo with a dashboard beside it, and lets it learn for some minutes first.
"""

import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, expect

from rig.browser import open_browser, open_page
from rig.gateways import free_port
from rig.waiting import answers, wait_until

IMAGES = Path(__file__).parent.parent / "docs" / "images"
LEARNING = 120_000
"""Milliseconds to wait until the charts have data."""
UPDATES = 1_000
WIDTH = 1360


def overview(page: Page) -> None:
    expect(page.locator("figure.chart .uplot").first).to_be_visible()


def trajectories(page: Page) -> None:
    page.keyboard.press("g")
    page.keyboard.press("t")
    expect(page.locator("td.uid").first).to_be_visible()
    page.get_by_label("Order").select_option("-reward")
    expect(page).to_have_url(re.compile("sort="))
    for key in "jxjxjj":
        page.keyboard.press(key)


def trajectory(page: Page) -> None:
    page.goto(page.url.split("#")[0] + "#/trajectories?channel=validation&sort=-reward")
    expect(page.locator(".found b")).not_to_have_text("0")
    page.keyboard.press("Enter")
    expect(page.locator(".turn.response").first).to_be_visible()


def tokens(page: Page) -> None:
    trajectory(page)
    page.keyboard.press("1")
    page.locator(".tokens .tok:not(.prompt)").nth(1).hover()


def group(page: Page) -> None:
    trajectory(page)
    page.keyboard.press("s")
    expect(page.locator(".rollout pre").first).to_be_visible()
    page.keyboard.press("j")


def preview(page: Page) -> None:
    page.keyboard.press("g")
    page.keyboard.press("n")
    expect(page.locator(".preview td.prompt").first).to_be_visible()


def audit(page: Page) -> None:
    trajectory(page)
    for key, own, why in (("m", "worth a look", "the right answer by a strange way"), ("l", "0.5", "half right")):
        page.keyboard.press(key)
        dialog = page.get_by_role("dialog")
        dialog.locator("input").nth(0).fill(own)
        dialog.get_by_label("Who").fill("ada")
        dialog.get_by_label("Why").fill(why)
        page.keyboard.press("Enter")
        expect(dialog).to_have_count(0)
    page.keyboard.press("g")
    page.keyboard.press("a")
    expect(page.locator("main tbody tr").nth(1)).to_be_visible()


PICTURES: tuple[tuple[Callable[[Page], None], bool, int], ...] = (
    (overview, False, 800),
    (overview, True, 800),
    (trajectories, False, 640),
    (trajectory, False, 480),
    (tokens, True, 480),
    (group, False, 320),
    (preview, False, 480),
    (audit, False, 320),
)
"""The view, whether the theme is dark, and the height that is shown."""


@contextmanager
def demo() -> Iterator[int]:
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "rig.watched_demo", str(port), folder, str(UPDATES)]
        process = subprocess.Popen(command)
        try:
            url = f"http://127.0.0.1:{port}/health"
            wait_until(lambda: process.poll() is not None or answers(url), "the demo", timeout=300)
            yield port
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(90)


def take_all(browser: Browser, url: str) -> None:
    for view, dark, height in PICTURES:
        with open_page(browser, url, dark=dark) as (page, _):
            page.set_viewport_size({"width": WIDTH, "height": height})
            page.set_default_timeout(60_000)
            page.goto(url)
            overview(page)
            view(page)
            page.wait_for_timeout(700)  # until legend, focus ring and last frame are drawn
            path = IMAGES / f"dashboard-{view.__name__}-{'dark' if dark else 'light'}.png"
            page.screenshot(path=path)
            print(path.name, path.stat().st_size)


def main(port: int, wait: float) -> None:
    url = f"http://127.0.0.1:{port}"
    with open_browser() as browser:
        with open_page(browser, url) as (page, _):
            page.wait_for_timeout(wait)
        take_all(browser, url)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(int(sys.argv[1]), 0)
    else:
        with demo() as port:
            main(port, LEARNING)
