"""`stepwell down`: stops the `stepwell up` of this folder, and waits until it has ended."""

import signal
import sys
import time

from stepwell.config.up import DownSettings
from stepwell.errors import NotReady
from stepwell.up.processes import StartupScreen
from stepwell.up.state_folder import RunRecord, StateFolder, send, this_folder

TIMEOUT = 75.0
"""Seconds: a gateway takes up to 40 to end, Ray some more."""
POLL = 0.1


def run_down(settings: DownSettings) -> None:
    folder, screen = this_folder(), StartupScreen(sys.stdout)
    record = folder.record()
    if not folder.is_occupied() or record is None:
        screen.say("nothing is running in this folder")
    elif not send(record, signal.SIGTERM):
        raise NotReady(f"pid {record.pid} is not visible from here: stop it where it was started")
    elif _has_ended(folder, record, screen):
        screen.say("ended", instead_of=_named(record))
    else:
        send(record, signal.SIGKILL)
        screen.say(f"it did not end within {TIMEOUT:g} s and was killed", instead_of=_named(record))


def _has_ended(folder: StateFolder, record: RunRecord, screen: StartupScreen) -> bool:
    deadline = time.monotonic() + TIMEOUT
    while folder.is_occupied():
        if time.monotonic() > deadline:
            return False
        screen.wait(_named(record), "it delivers its waiting steps and ends")
        time.sleep(POLL)
    return True


def _named(record: RunRecord) -> str:
    return f"pid {record.pid}"
