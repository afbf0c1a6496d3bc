"""Waiting for a condition, with a bound and a name for what is waited for."""

import asyncio
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable

ANY_CERTIFICATE = ssl._create_unverified_context()


def answers(url: str) -> bool:
    """Whatever certificate it has."""
    try:
        with urllib.request.urlopen(url, timeout=2, context=ANY_CERTIFICATE if url.startswith("https:") else None):
            return True
    except (OSError, urllib.error.URLError):
        return False


def wait_until(condition: Callable[[], bool], what: str, timeout: float = 120.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout:g} s for {what}"
        time.sleep(0.02)


async def until(condition: Callable[[], bool], what: str, timeout: float = 120.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout:g} s for {what}"
        await asyncio.sleep(0.005)
