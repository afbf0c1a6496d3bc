"""Runs environments in processes forked from this one, which has imported what nearly all of them import.

    python -m tests.originals.atropos.child SOCKET

A connection is one run: a line of JSON says what to run (`Job`), and the answer is the process' number.
"""

import functools
import importlib
import inspect
import json
import os
import runpy
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypedDict

PRELOADED = (
    "stepwell.envs",
    "stepwell.envs.loop.lifecycle",
    "datasets",
    "transformers",
    "openai",
    "math_verify",
    "wandb",
    "rich",
    "tests.originals.atropos.table",
)
STAGES = {
    "setup": "setup",
    "get_next_item": "get_next_item",
    "collect_trajectory": "collect_trajectories",
    "collect_trajectories": "collect_trajectories",
    "evaluate": "evaluate",
    "setup_data": "setup",  # this and the next two: of EvalBase
    "run_item": "evaluate",
    "__call__": "evaluate",
}
"""The methods that are noted, and as what."""


class Job(TypedDict):
    file: str
    """Of the row."""
    argv: list[str]
    """From the environment's file on."""
    whose: str
    """stepwell or atroposlib."""
    folder: str
    """To work in."""
    tokenizer: str
    variables: dict[str, str]


def main() -> None:
    preload(Path(sys.argv[1]).parent / "preloaded")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(sys.argv[1])
        listener.listen()
        while True:
            connection, _ = listener.accept()
            job: Job = json.loads(connection.makefile().readline())
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.setsid()
                connection.sendall(f"{os.getpid()}\n".encode())
                run_and_exit(job)
            connection.close()


def preload(folder: Path) -> None:
    """Also what the packages import when they are first used."""
    for name in PRELOADED:
        importlib.import_module(name)
    import datasets
    import transformers

    from rig.tiny_model import make_tiny_model

    transformers.AutoTokenizer.from_pretrained(make_tiny_model(folder))
    datasets.Dataset.from_list([{"number": number} for number in range(4)]).shuffle(seed=1)


def run_and_exit(job: Job) -> None:
    folder = Path(job["folder"])
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(job["variables"])
    os.chdir(folder / "work")
    code: Any = 1
    try:
        run(job)
        code = 0
    except SystemExit as ended:
        code = ended.code
    except BaseException:  # noqa: BLE001 - whatever ends it is printed, as Python itself does
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        note(folder, "ended", str(code))
        os._exit(0)


def run(job: Job) -> None:
    prepare(job)
    sys.path[:] = [path for path in sys.path if path]
    if job["whose"] == "stepwell":
        sys.path.insert(0, str(Path.cwd()))
        sys.argv[:] = ["-m", *job["argv"]]
        runpy.run_module("stepwell.envs", run_name="__main__", alter_sys=True)
    else:
        file = Path(job["argv"][0])
        root, _, below = str(file).partition("/environments/")
        sys.path.insert(0, str(file.parent))
        sys.path.append(root)  # as where the distribution is installed editable
        sys.argv[:] = job["argv"]
        if "\nfrom ." in file.read_text():  # its page runs it with -m
            module = f"environments/{below}".removesuffix(".py").replace("/", ".")
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(file), run_name="__main__")


def prepare(job: Job) -> None:
    """Puts the stand-ins in, and notes what the environment does from now on."""
    from tests.originals.atropos.stand_ins import install
    from tests.originals.atropos.table import row_of

    install(row_of(job["file"]), Path(job["tokenizer"]))
    if job["whose"] == "stepwell":
        from stepwell.envs.environment import Environment as BaseEnv
        from stepwell.envs.evaluation import EvalBase
    else:
        from atroposlib.envs.base import BaseEnv  # type: ignore[import-not-found,no-redef]
        from atroposlib.envs.eval import EvalBase  # type: ignore[import-not-found,no-redef]
    watch(BaseEnv, Path(job["folder"]))
    watch(EvalBase, Path(job["folder"]))


def note(folder: Path, stage: str, text: str = "") -> None:
    with (folder / "stages.jsonl").open("a") as file:
        file.write(json.dumps([stage, text]) + "\n")


def watch(base: type, folder: Path) -> None:
    """Notes when a stage of an environment has ended, and how, in stages.jsonl."""
    original: Callable[..., None] = base.__init__  # type: ignore[misc]

    @functools.wraps(original)
    def init(self: Any, *args: Any, **options: Any) -> None:
        for name, stage in STAGES.items():
            method = next((vars(kind)[name] for kind in type(self).__mro__ if name in vars(kind)), None)
            if method is not None and not hasattr(method, "watched"):
                setattr(type(self), name, watched(method, stage, folder))
        original(self, *args, **options)

    base.__init__ = init  # type: ignore[misc]


def watched(method: Callable[..., Any], stage: str, folder: Path) -> Callable[..., Any]:
    @functools.wraps(method)
    def at_once(*args: Any, **options: Any) -> Any:
        result = method(*args, **options)
        note(folder, stage, type(result).__name__)
        return result

    @functools.wraps(method)
    async def wrapper(*args: Any, **options: Any) -> Any:
        try:
            result = await method(*args, **options)
        except Exception:
            note(folder, f"{stage} failed", traceback.format_exc())
            raise
        note(folder, stage, repr(result)[:200] if stage == "evaluate" else type(result).__name__)
        return result

    noting: Callable[..., Any] = wrapper if inspect.iscoroutinefunction(method) else at_once
    vars(noting)["watched"] = True
    return noting


if __name__ == "__main__":
    main()
