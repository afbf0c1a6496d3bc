"""`stepwell doctor`: examines an engine, prints the report, and ends with an exit status for scripts."""

import asyncio
import logging
import sys
from pathlib import Path

import orjson

from stepwell.config.tools import DoctorSettings
from stepwell.doctor.examination import examine
from stepwell.doctor.findings import Report
from stepwell.doctor.machine_checks import machine_checks
from stepwell.doctor.report_text import as_json, coloured, plain


def run_doctor(settings: DoctorSettings) -> None:
    logging.getLogger("stepwell.gateway").setLevel(logging.CRITICAL)  # the report says what the gateway would log
    report = asyncio.run(examine(settings, show_progress=_show_progress))
    _show_progress("this machine")
    report = report.with_checks(machine_checks(settings.ray_address, Path.cwd()))
    _show_progress("")
    if settings.as_json:
        sys.stdout.write(orjson.dumps(as_json(report), option=orjson.OPT_INDENT_2).decode() + "\n")
    else:
        _print(report)
    sys.exit(0 if report.is_exact else 1)


def _print(report: Report) -> None:
    if sys.stdout.isatty():
        try:
            from rich.console import Console
        except ImportError:
            pass  # rich adds only the colours
        else:
            Console().print(coloured(report), soft_wrap=True)
            return
    sys.stdout.write(plain(report))


def _show_progress(next_check: str) -> None:
    """In a terminal: one line that each call overwrites."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{next_check and f'examining: {next_check} … '}")
        sys.stderr.flush()
