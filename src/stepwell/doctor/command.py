"""The command: examine, print, and end with a status that a script can use."""

import asyncio
import logging
import sys
from pathlib import Path

import orjson

from stepwell.config.tools import DoctorSettings
from stepwell.doctor.examination import Patient, examine
from stepwell.doctor.findings import Report
from stepwell.doctor.machine_checks import machine_checks
from stepwell.doctor.report_text import as_json, coloured, plain


def run_doctor(settings: DoctorSettings) -> None:
    logging.getLogger("stepwell.gateway").setLevel(logging.CRITICAL)  # what its gateway meets is the doctor's to tell
    patient = Patient(engine=settings.engine, key=settings.key, tokenizer_path=settings.tokenizer_path)
    report = asyncio.run(examine(patient, say=_say))
    _say("this machine")
    report = report.with_checks(machine_checks(settings.ray_address, Path.cwd()))
    _say("")
    if settings.as_json:
        sys.stdout.write(orjson.dumps(as_json(report), option=orjson.OPT_INDENT_2).decode() + "\n")
    else:
        _show(report)
    sys.exit(0 if report.is_exact else 1)


def _show(report: Report) -> None:
    if sys.stdout.isatty():
        try:
            from rich.console import Console
        except ImportError:
            pass  # colours are all that it would add
        else:
            Console().print(coloured(report), soft_wrap=True)
            return
    sys.stdout.write(plain(report))


def _say(next_thing: str) -> None:
    """On one line, which the next one replaces."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{next_thing and f'examining: {next_thing} … '}")
        sys.stderr.flush()
