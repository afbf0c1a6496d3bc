"""The demo in little: `terminated_demo FOLDER`. Its run starts an engine that does not end by SIGTERM, and waits.

Says the pid of the engine once that is running.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import ray

from stepwell.commands.demo import DemoSettings, run_demo
from stepwell.demo import engine, run
from stepwell.demo import run as pool
from stepwell.demo.screen import DemoScreen

ENGINE = "#!/bin/sh\ntrap '' TERM\necho stubborn\nwhile :; do sleep 0.1; done\n"


class WaitingDemo:
    def __init__(self, screen: DemoScreen, *, out: Path, **_: object) -> None:
        self._folder = out

    def run(self) -> NoReturn:
        program = self._folder / "python"
        program.write_text(ENGINE)
        program.chmod(0o700)
        log = self._folder / "vllm.log"
        with engine.start_engine(self._folder, python=program, log=log) as started, pool.demo_ray():
            while "stubborn" not in log.read_text():
                time.sleep(0.01)
            sys.stdout.write(f"{started.process.pid}\n")
            sys.stdout.flush()
            time.sleep(60.0)
        raise AssertionError("nobody has ended it")


@contextmanager
def no_ray(*_: object, **__: object) -> Iterator[dict[str, str]]:
    """Only what a start of Ray does to the handler of SIGTERM."""
    ray._private.utils.set_sigterm_handler(lambda *_: sys.exit(15))  # type: ignore[no-untyped-call]
    yield {"RAY_ADDRESS": ""}


if __name__ == "__main__":
    engine.STOP_TIMEOUT = 0.3
    setattr(pool, "local_ray", no_ray)  # noqa: B010 - the module does not export it
    run.Demo = WaitingDemo  # type: ignore[assignment,misc]
    run_demo(DemoSettings(out=Path(sys.argv[1])))
