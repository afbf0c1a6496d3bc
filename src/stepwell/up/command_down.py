"""`stepwell down`: ends the `up` of this folder, and waits until it has ended."""

import signal
import sys
import time

from stepwell.config.up import DownSettings
from stepwell.errors import NotReady
from stepwell.up.screen import Screen
from stepwell.up.state_folder import Record, StateFolder, send, this_folder

PATIENCE = 75.0
"""Seconds: a gateway takes up to 40 to end, Ray some more."""
POLL = 0.1


def run_down(settings: DownSettings) -> None:
    folder, screen = this_folder(), Screen(sys.stdout)
    record = folder.record()
    if not folder.is_occupied() or record is None:
        screen.say("nothing is running in this folder")
    elif not send(record, signal.SIGTERM):
        raise NotReady(f"pid {record.pid} is not seen from here: end it where it was started")
    elif _has_ended(folder, record, screen):
        screen.say("ended", instead_of=_named(record))
    else:
        send(record, signal.SIGKILL)
        screen.say(f"it did not end within {PATIENCE:g} s and was killed", instead_of=_named(record))


def _has_ended(folder: StateFolder, record: Record, screen: Screen) -> bool:
    deadline = time.monotonic() + PATIENCE
    while folder.is_occupied():
        if time.monotonic() > deadline:
            return False
        screen.wait(_named(record), "it delivers what it holds and ends")
        time.sleep(POLL)
    return True


def _named(record: Record) -> str:
    return f"pid {record.pid}"
