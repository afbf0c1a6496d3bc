"""Debian's Chromium, driven by Playwright, and pages that remember what they did wrong."""

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import uvicorn
from fastapi import FastAPI
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect, sync_playwright

from rig.waiting import wait_until

LAPTOP = {"width": 1440, "height": 900}
PATIENCE = 180_000
"""Milliseconds that a busy machine may take to show something."""
expect.set_options(timeout=PATIENCE)


@contextmanager
def open_browser() -> Iterator[Browser]:
    """While it is open nothing else in its thread can use asyncio: tests with it are plain functions."""
    chromium = shutil.which("chromium")
    assert chromium, "these tests need Debian's Chromium: apt-get install -y chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Faults:
    """What a page should never do."""

    origin: str
    said: list[str] = field(default_factory=list)
    """Errors on its console, exceptions and breaches of its Content-Security-Policy among them."""
    strayed: list[str] = field(default_factory=list)
    """Requests to anywhere but its own server."""

    def watch(self, page: Page) -> None:
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("request", self._request)
        page.on("dialog", lambda dialog: self.said.append(f"dialog: {dialog.message}"))

    def none(self) -> bool:
        return not self.said and not self.strayed

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.said.append(message.text)

    def _request(self, request: Request) -> None:
        if not request.url.startswith(f"{self.origin}/"):
            self.strayed.append(request.url)


@contextmanager
def open_page(browser: Browser, origin: str, *, dark: bool = False) -> Iterator[tuple[Page, Faults]]:
    """A tab with nothing in its storage."""
    scheme = "dark" if dark else "light"
    context = browser.new_context(viewport=LAPTOP, color_scheme=scheme)  # type: ignore[arg-type]
    try:
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        faults = Faults(origin)
        faults.watch(page)
        yield page, faults
    finally:
        context.close()


@contextmanager
def in_thread(app: FastAPI) -> Iterator[str]:
    """An application served from a thread of this process; gives its URL."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", access_log=False))
    thread = threading.Thread(target=server.run, name="server")
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive(), "the server to start")
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
