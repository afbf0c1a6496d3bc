"""`stepwell demo`."""

import signal
import sys
from pathlib import Path
from typing import Literal

from pydantic import Field

from stepwell.commands.sections import Section
from stepwell.common.imports import require

NEEDED = ("torch", "openai", "rich", "matplotlib")


class DemoSettings(Section, env_prefix="STEPWELL_DEMO_"):
    """Train a tiny model on the actions of its agent, with a real vLLM, on a CPU.

    It takes about four minutes on two cores (live: six), and writes its numbers, a chart and its logs to a folder.
    """

    examples = ("stepwell demo", "stepwell demo --task live")

    task: Literal["rev", "tool", "live"] = "rev"
    """The task that the model learns: rev, to reverse a word; tool, to call a calculator and repeat its result; live,
    what the users of a chat service want, from what they say next, while a guard rolls back a bad update."""
    seed: int = 0
    """Seed of the model's weights, of the held-out samples and of the order of the other samples."""
    updates: int | None = Field(default=None, ge=1)
    """Batches to train on; without it, as many as the task needs."""
    out: Path = Path("stepwell-demo")
    """Folder for the results; files of an earlier run are overwritten."""
    plot: bool = True
    """Draw the reward while it rises, and write a picture of it."""
    vllm_python: str | None = None
    """Python of the environment that has vLLM; without it, this environment or the one in the cache is used."""


def run_demo(settings: DemoSettings) -> None:
    for package in NEEDED:
        require(package, "demo")
    from stepwell.demo.live_run import LiveDemo
    from stepwell.demo.run import Demo, Terminated, ending_on_sigterm
    from stepwell.demo.screen import DemoScreen

    screen = DemoScreen()
    make: type[Demo] | type[LiveDemo] = LiveDemo if settings.task == "live" else Demo
    try:
        with ending_on_sigterm():
            outcome = make(
                screen,
                task=settings.task,
                seed=settings.seed,
                updates=settings.updates,
                out=settings.out,
                plot=settings.plot,
                vllm_python=settings.vllm_python,
            ).run()
    except (KeyboardInterrupt, Terminated) as ended:
        screen.say("stopped")
        sys.exit(128 + (signal.SIGTERM if isinstance(ended, Terminated) else signal.SIGINT))
    screen.say(outcome.text())
    screen.say(f"all files are in {settings.out}: " + ", ".join(sorted(path.name for path in settings.out.iterdir())))
