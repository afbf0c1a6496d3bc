"""`stepwell doctor`: examines an engine, prints the report, and ends with an exit status for scripts."""

import asyncio
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field, field_validator

from stepwell.commands.sections import Section

if TYPE_CHECKING:
    from stepwell.doctor.findings import Report


class DoctorSettings(Section, env_prefix="STEPWELL_DOCTOR_"):
    """Examine an engine, its model and this machine: what works, what fails and why, and whether every token that
    a gateway would record is exact. It changes nothing, and sends about fifty short requests to the engine.

    The exit status is 0 if no fault was found, else 1.
    """

    examples = (
        "stepwell doctor --engine http://127.0.0.1:8001",
        "stepwell doctor --engine http://127.0.0.1:8001 --harness claude-code",
    )

    engine: str
    """Address of the vLLM server, http://host:port."""
    tokenizer_path: str | None = None
    """Folder or name of the Hugging Face tokenizer, to decode tokens and to compare the chat template with; without it,
    the engine decodes its own tokens."""
    key: str | None = None
    """API key that the engine requires. Prefer STEPWELL_DOCTOR_KEY: other users can read a command line."""
    ray_address: str | None = None
    """Ray's address, host:port; without it, the cluster on this machine is examined, if there is one."""
    harness: str | None = None
    """A harness of this machine to try with the engine, too: claude-code, codex, openclaw, opencode or qwen-code. It
    works on a small task in a folder of its own, with the rights of this process."""
    as_json: bool = Field(default=False, alias="json")
    """Print the findings as JSON."""

    @field_validator("engine")
    @classmethod
    def _is_address(cls, value: str) -> str:
        if not value.startswith(("http://", "https://")):
            raise ValueError(f"{value!r} is not an address; write http://host:port")
        return value.rstrip("/").removesuffix("/v1")


def run_doctor(settings: DoctorSettings) -> None:
    import orjson

    from stepwell.doctor.examination import examine
    from stepwell.doctor.findings import as_json
    from stepwell.doctor.machine_checks import machine_checks

    logging.getLogger("stepwell.gateway").setLevel(logging.CRITICAL)  # the report says what the gateway would log
    report = asyncio.run(
        examine(
            settings.engine,
            key=settings.key,
            tokenizer_path=settings.tokenizer_path,
            harness=settings.harness,
            show_progress=_show_progress,
        )
    )
    _show_progress("this machine")
    report = report.with_checks(machine_checks(settings.ray_address, Path.cwd()))
    _show_progress("")
    if settings.as_json:
        sys.stdout.write(orjson.dumps(as_json(report), option=orjson.OPT_INDENT_2).decode() + "\n")
    else:
        _print(report)
    sys.exit(0 if report.is_exact else 1)


def _print(report: "Report") -> None:
    from stepwell.doctor.findings import coloured, plain

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
    """Shows the progress in a terminal: one line that each call overwrites."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{next_check and f'examining: {next_check} … '}")
        sys.stderr.flush()
