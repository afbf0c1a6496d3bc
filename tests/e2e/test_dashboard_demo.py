"""The dashboard under the live load of the demo: real vLLM, real agents, a model that learns meanwhile."""

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.rig.browser import open_browser, open_page
from tests.rig.gateways import free_port
from tests.rig.waiting import answers, wait_until

UPDATES = 400
"""More than there is time for: it is interrupted when all was seen."""
STARTING = 400.0
PATIENCE = 60_000


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port, out = free_port(), tmp_path_factory.mktemp("demo")
    log = out / "demo.log"
    command = [sys.executable, "-m", "tests.rig.watched_demo", str(port), str(out / "run"), str(UPDATES)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: process.poll() is not None or answers(f"{url}/health"), "the demo", timeout=STARTING)
        assert process.poll() is None, log.read_text()
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(90)


def test_every_view_has_something_to_show_while_a_model_learns(url: str) -> None:
    with open_browser() as browser, open_page(browser, url) as (page, faults):
        page.set_default_timeout(PATIENCE)
        page.goto(url)
        see_the_overview(page)
        see_a_trajectory(page, url)
        see_a_group(page)
        see_a_decision(page)
        assert faults.none()


def see_the_overview(page: Page) -> None:
    expect(page.locator("table", has_text="Engines")).to_contain_text("healthy", timeout=PATIENCE)
    for chart in ("Steps", "Tokens", "Reward", "Staleness", "Queue", "Oldest", "Gateway"):
        expect(page.locator(f"figure[aria-label^={chart}] .canvas:not(.empty)")).to_be_visible(timeout=PATIENCE)


def see_a_trajectory(page: Page, url: str) -> None:
    page.goto(f"{url}/#/trajectories?channel=validation")
    expect(page.locator("td.uid").first).to_be_visible(timeout=PATIENCE)
    page.keyboard.press("Enter")
    expect(page.locator(".turn.response").first).to_be_visible(timeout=PATIENCE)
    page.keyboard.press("t")
    expect(page.locator(".tokens .tok").first).to_be_visible()


def see_a_group(page: Page) -> None:
    page.keyboard.press("s")
    expect(page.locator(".rollout pre").first).to_be_visible(timeout=PATIENCE)


def see_a_decision(page: Page) -> None:
    page.keyboard.press("r")
    page.get_by_role("dialog").get_by_label("Who").fill("ada")
    page.keyboard.press("Enter")
    expect(page.locator(".notice")).to_contain_text("1 done", timeout=PATIENCE)
    expect(page.locator(".rollout.current")).to_contain_text("rejected", timeout=PATIENCE)
    page.keyboard.press("g")
    page.keyboard.press("a")
    expect(page.locator("main tbody tr").first).to_contain_text("ada", timeout=PATIENCE)
