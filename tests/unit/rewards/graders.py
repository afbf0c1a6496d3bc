"""Reward functions that misbehave in every way we know of. What a call does is named by the sample's metadata."""

# ruff: noqa: T201 - functions print, too

import asyncio
import ctypes
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from stepwell.pool.api.scoring import Score
from stepwell.rewards.sample import Sample

leaked: list[bytes] = []


def graded(sample: Sample) -> Any:
    return WAYS[str(sample.metadata.get("way", "fine"))](sample)


async def graded_async(sample: Sample) -> Any:
    way = sample.metadata.get("way", "fine")
    if way == "slow":
        await asyncio.sleep(0.5)
        return 1.0
    if way == "thread":
        crashes_in_a_thread()
    if way in ("never", "thread"):
        await asyncio.sleep(1_000)
    while way == "stubborn":
        try:
            await asyncio.sleep(1_000)
        except asyncio.CancelledError:
            continue
    return graded(sample)


class Grader:
    async def __call__(self, sample: Sample) -> float:
        return 2.0


made = Grader()
not_a_function = 3


def loops(_: Sample) -> None:
    print("round and round")
    while True:
        pass


def backtracks(_: Sample) -> bool:
    return re.match(r"(a+)+$", "a" * 60 + "b") is not None


def raises(_: Sample) -> None:
    print("about to fail")
    raise ValueError("cannot read this")


def leaks(_: Sample) -> float:
    leaked.append(bytes(200 * 2**20))
    return 1.0


def crashes_in_a_thread() -> None:
    threading.Timer(0.05, ctypes.string_at, [0]).start()


def prints_without_end(_: Sample) -> None:
    while True:
        print("all work and no play", flush=True)
        os.write(1, b"makes Jack a dull boy\n" * 1_000)


def starts_a_process(_: Sample) -> None:
    print(f"pid {subprocess.Popen(['sleep', '1000']).pid}")
    while True:
        time.sleep(1)


def notes(sample: Sample) -> float:
    with Path(str(sample.metadata["path"])).open("a") as file:
        file.write("called\n")
    return 1.0


def waits_for_notes(sample: Sample) -> float:
    """Until the others have been called, which so must not wait for it."""
    path = Path(str(sample.metadata["path"]))
    while not path.exists() or path.read_text().count("\n") < 60:
        time.sleep(0.05)
    return 1.0


def naps(_: Sample) -> float:
    """Without letting anyone else run."""
    time.sleep(0.3)
    return 1.0


WAYS: dict[str, Callable[[Sample], Any]] = {
    "fine": lambda sample: 1.0,
    "loop": loops,
    "backtrack": backtracks,
    "nap": naps,
    "allocate": lambda sample: float(len(bytearray(10 * 2**30))),
    "leak": leaks,
    "segfault": lambda sample: ctypes.string_at(0),
    "raise": raises,
    "exit": lambda sample: os._exit(3),
    "system_exit": lambda sample: exit(),
    "kill": lambda sample: os.kill(os.getpid(), signal.SIGKILL),
    "nan": lambda sample: float("nan"),
    "infinite": lambda sample: Score(1.0, {"style": float("inf")}),
    "text": lambda sample: "0.5",
    "nothing": lambda sample: None,
    "short": lambda sample: Score(1.0, step_rewards=(0.5, 0.5)),
    "whole": lambda sample: Score(np.float32(0.5), {"style": 1, "facts": True}, (0.25,), "well done"),  # type: ignore[arg-type]
    "read": lambda sample: float(sample.response_text == sample.metadata["answer"]),
    "print": prints_without_end,
    "process": starts_a_process,
    "touch": lambda sample: Path(str(sample.metadata["path"])).touch(),
    "note": notes,
    "wait": waits_for_notes,
    "pid": lambda sample: float(os.getpid()),
}
