"""examples/tinker/train.py, unchanged, in SkyRL's environment."""

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rig.trainers.process import EXAMPLES, start_command


@dataclass(frozen=True, slots=True)
class TinkerRun:
    process: "subprocess.Popen[str]"
    log: Path

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def is_over(self) -> bool:
        return self.process.poll() is not None

    def wait(self, timeout: float) -> None:
        """Until it has ended well; it is ended if that takes too long."""
        try:
            self.process.wait(timeout)
        finally:
            self.kill()
        assert self.process.returncode == 0, self.log.read_text()[-8000:]

    def updates(self, channel: str) -> list[dict[str, Any]]:
        return [line for line in self._lines(channel) if "update" in line]

    def published(self, channel: str) -> list[str]:
        """The adapters that the engines were given, by their names."""
        return [line["adapter"] for line in self._lines(channel)]

    def _lines(self, channel: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith('{"adapter"')]
        return [line for line in lines if line["channel"] == channel]


def start_tinker(run: Mapping[str, object], settings: Mapping[str, object], *, address: str, log: Path) -> TinkerRun:
    """`run` and `settings` are the file that the example reads; it is written beside the log."""
    told = log.with_suffix(".toml")
    tables = "\n[settings]\n".join("".join(map(_line, table.items())) for table in (run, settings))
    told.write_text(tables)
    command = ["python", EXAMPLES / "tinker" / "train.py", told]
    return TinkerRun(start_command("skyrl", command, address=address, log=log, TINKER_API_KEY="tml-of-the-tests"), log)


def _line(item: tuple[str, object]) -> str:
    name, value = item
    return f"{name} = {json.dumps(value)}\n"
