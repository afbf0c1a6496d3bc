"""Redaction functions for tests, good and bad. They run in a process of their own."""

import os
import re
import signal
import sys
import threading
import time

SECRET = "alice.liddell@example.org"
PATTERN = re.compile(r"[\w.]+@[\w.]+")


def mails(text: str) -> list[tuple[int, int]]:
    return [found.span() for found in PATTERN.finditer(text)]


def raising(text: str) -> list[tuple[int, int]]:
    raise ValueError(text)


def hanging(text: str) -> list[tuple[int, int]]:
    if SECRET in text:
        while True:
            time.sleep(1)
    return []


def printing(text: str) -> list[tuple[int, int]]:
    sys.stderr.write(text)
    sys.stdout.write(text)
    return mails(text)


def dying(text: str) -> list[tuple[int, int]]:
    if SECRET in text:
        os.kill(os.getpid(), signal.SIGKILL)
    return []


def dying_later(text: str) -> list[tuple[int, int]]:
    """When nobody asks it anything."""
    if SECRET in text:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return []


async def waiting(text: str) -> list[tuple[int, int]]:
    return []
