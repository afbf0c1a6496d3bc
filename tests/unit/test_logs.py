import json
import logging
import subprocess
import sys
from typing import Any

import pytest

from stepwell.logs import HumanLines, JsonLines, about

PROGRAM = """
import logging, sys
from stepwell import logs
logs.setup(json=sys.argv[1] == "json")
log = logging.getLogger("stepwell.gateway")
log.debug("not shown")
for name in ("httpx", "httpx2"):
    logging.getLogger(name).info("HTTP Request: not shown, one for each call")
log.warning("held: %s", "paused", extra=logs.about(trajectory_uid="t1", engine=None, waiting=3))
"""


def record(message: str, /, *args: object, failure: BaseException | None = None, **fields: Any) -> logging.LogRecord:
    raised = (type(failure), failure, failure.__traceback__) if failure else None
    made = logging.makeLogRecord({"name": "stepwell", "levelname": "WARNING", "msg": message, "args": args})
    made.__dict__.update(about(**fields), exc_info=raised)
    return made


def run(style: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, style], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_plain_lines_end_with_their_fields() -> None:
    (line,) = run("human")
    assert line.endswith(" WARNING held: paused trajectory_uid=t1 waiting=3")


def test_json_lines_have_the_same_fields() -> None:
    (line,) = run("json")
    shown = json.loads(line)
    assert next(iter(shown)) == "time"
    assert len(shown.pop("time")) == len("2000-01-01T00:00:00.000Z")
    assert shown == {
        "level": "WARNING",
        "logger": "stepwell.gateway",
        "message": "held: paused",
        "trajectory_uid": "t1",
        "waiting": 3,
    }


@pytest.mark.parametrize("lines", [HumanLines(), JsonLines()])
@pytest.mark.parametrize("trick", ["\n", "\r", "\x1b[2J", "\x85", "\u2028", "\x00", "\x9b1m"])
def test_line_breaks_and_escape_sequences_are_escaped(lines: logging.Formatter, trick: str) -> None:
    shown = lines.format(record("aborted: %s", f"why{trick}2000-01-01 ERROR forged", engine=f"e{trick}"))
    assert shown.isprintable()


def test_a_record_needs_no_fields() -> None:
    plain = logging.makeLogRecord({"levelname": "INFO", "msg": "100%"})
    assert HumanLines().format(plain).endswith(" INFO 100%")
    assert json.loads(JsonLines().format(plain))["message"] == "100%"


def test_a_field_does_not_replace_a_standard_one() -> None:
    assert json.loads(JsonLines().format(record("real", message="of the field", level="low")))["message"] == "real"


def test_a_traceback_follows_its_line_or_is_a_field() -> None:
    try:
        raise ValueError("broken\n2000-01-01 ERROR forged")
    except ValueError as failure:
        failed = record("no", failure=failure)
    first, *rest = HumanLines().format(failed).splitlines()
    assert first.endswith("WARNING no")
    assert rest
    assert all(line.startswith("    ") for line in rest)
    assert "ValueError: broken" in json.loads(JsonLines().format(failed))["exception"]
