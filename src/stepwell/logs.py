"""Log lines, for people or for machines.

- A record is one line: line breaks and escape sequences in its text are escaped.
- Fields such as trajectory_uid can be searched for.
- A traceback follows its line, indented; in JSON it is a field.
"""

import logging
import sys
import time
from collections.abc import Mapping
from json import dumps
from typing import TypeAlias

Field: TypeAlias = str | int | float

ONE_LINE_A_CALL = ("httpx", "httpx2")
"""Loggers that write a line for each call of an SDK. They warn only, unless somebody has set their level."""
UNPRINTABLE = (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)
ESCAPES = {code: repr(chr(code))[1:-1] for code in UNPRINTABLE}


def setup(json: bool) -> None:
    """Send this process's logs to stderr, as plain lines or as JSON objects."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if json else HumanLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for logger in map(logging.getLogger, ONE_LINE_A_CALL):
        logger.setLevel(logger.level or logging.WARNING)


def about(**fields: Field | None) -> dict[str, dict[str, Field]]:
    """Fields of a record, for a log call's `extra`: log.warning("…", extra=about(trajectory_uid=…)).

    A field that is None is left out.
    """
    return {"about": {name: value for name, value in fields.items() if value is not None}}


class HumanLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = [f"{name}={value}" for name, value in _fields(record).items()]
        line = " ".join((self.formatTime(record), record.levelname, record.getMessage(), *fields)).translate(ESCAPES)
        if not record.exc_info:
            return line
        return "\n    ".join((line, *self.formatException(record.exc_info).splitlines()))


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        shown: dict[str, Field] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            shown["exception"] = self.formatException(record.exc_info)
        return dumps(shown | {name: value for name, value in _fields(record).items() if name not in shown})


def _fields(record: logging.LogRecord) -> Mapping[str, Field]:
    fields: Mapping[str, Field] = getattr(record, "about", {})
    return fields
