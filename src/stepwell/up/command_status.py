"""`stepwell status`: asks a dashboard, over HTTP alone, and shows one screen."""

import json
import sys

from pydantic import ValidationError

from stepwell.config.up import StatusSettings
from stepwell.errors import Forbidden, NotReady
from stepwell.up.http import Answer, get, message
from stepwell.up.shapes import Status
from stepwell.up.showing import screen_of
from stepwell.up.state_folder import this_folder

TIMEOUT = 15.0
"""Seconds: the dashboard itself gives the gateways three, and the pool two."""


def run_status(settings: StatusSettings) -> None:
    url, key = (settings.url.rstrip("/"), settings.key) if settings.url else _of_this_folder()
    answer = get(f"{url}/api/status?fresh=true", key, TIMEOUT)
    status = _read(url, answer)
    shown = json.dumps(answer.body, indent=2) if settings.as_json else screen_of(status)
    sys.stdout.write(f"{shown}\n")


def _of_this_folder() -> tuple[str, str]:
    folder = this_folder()
    record = folder.record() if folder.is_occupied() else None
    if record is None:
        raise NotReady("nothing is running in this folder: start it with `stepwell up`, or name a dashboard with --url")
    if not record.is_ready:
        raise NotReady("it is not ready yet: the terminal where `stepwell up` runs says what it waits for")
    return record.dashboard, folder.key()


def _read(url: str, answer: Answer) -> Status:
    if answer.status in (401, 403):
        raise Forbidden(f"the dashboard at {url} asks for its control key: --key, or STEPWELL_STATUS_KEY")
    try:
        if answer.status == 200:
            return Status.model_validate(answer.body)
    except ValidationError:
        raise NotReady(f"{url} is no dashboard of this Stepwell's: what it answers cannot be read") from None
    raise NotReady(
        f"the dashboard at {url} does not answer: {message(answer)}; its log is .stepwell/logs/dashboard.log"
    )
