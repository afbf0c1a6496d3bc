"""One run of an environment: an engine, an Atropos server with a trainer, and the environment's own process."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from rig.atropos.calling import AtroposClient, Group, calling
from rig.atropos.processes import CHECKOUT, SETTINGS, atropos_python
from rig.atropos.server import serve_atropos
from rig.fake_engine import FakeEngine, Reply
from rig.local_pool import LocalPool
from rig.waiting import wait_until
from tests.originals.atropos.row import Answer, Json, Row

MODEL = "tiny"
LONGEST = 100_000
"""Most tokens of a rollout: the tiny tokenizer has one for each byte."""
PRELOAD_TIMEOUT_S = 120.0
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "disabled",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OPENAI_API_KEY": "none",
    "ATROPOS_ALLOW_DUMMY_MANAGED_SERVER": "1",
}
"""The last is for atroposlib alone, which otherwise refuses servers that give no tokens."""


Start: TypeAlias = Callable[[Json], Callable[[], None]]
"""Starts the process of a job; gives what ends it."""


class ScriptedEngine(FakeEngine):
    """Answers by what it is asked."""

    def __init__(self, row: Row) -> None:
        super().__init__(max_model_len=LONGEST)
        self.adapters |= set(row.models)
        self.answered = 0
        self._answer: Answer = row.answer
        self._asked: ContextVar[Json] = ContextVar("asked")

    def note(self, method: str, path: str, headers: dict[str, str], body: Json) -> None:
        super().note(method, path, headers, body)
        self._asked.set(body)

    def next_replies(self, n: int) -> list[Reply | None]:
        replies = [self._answer(self._asked.get(), self.answered + k) for k in range(n)]
        self.answered += n
        return [Reply(reply) if isinstance(reply, str) else reply for reply in replies]


@dataclass(frozen=True, slots=True)
class Outcome:
    stages: dict[str, str]
    """The stages that have ended, with what they gave; `… failed` with the traceback, and `ended` with the status."""
    group: Group | None
    """The first of the trainer's first batch."""
    command: Sequence[str]
    log: str

    @property
    def has_started(self) -> bool:
        return "setup" in self.stages and bool(self.stages.keys() & {"collect_trajectories", "evaluate"} or self.group)

    def __str__(self) -> str:
        stages = "\n".join(f"  {stage}: {text}" for stage, text in self.stages.items())
        return f"{' '.join(self.command)}\n{stages}\n{self.log[-6000:]}"


class Forkserver:
    """Forks a process for each run from one that has imported the large packages."""

    def __init__(self, path: Path, environments: Path) -> None:
        self._path = path
        self.environments = environments
        """A copy of Atropos' environments, to which files may be added."""

    def start(self, job: Json) -> Callable[[], None]:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self._path))
            connection.sendall(json.dumps(job).encode() + b"\n")
            return partial(_end, int(connection.makefile().readline()))


def start_literally(job: Json) -> Callable[[], None]:
    """By the command line that a user types; only the stand-ins come from elsewhere (`at_startup/sitecustomize.py`)."""
    folder = Path(job["folder"])
    env = {**_variables(folder), **job["variables"], "STEPWELL_TEST_JOB": json.dumps(job)}
    env["PYTHONPATH"] += f"{os.pathsep}{Path(__file__).parent / 'at_startup'}"
    command = [str(atropos_python()), "-m", "stepwell.envs", *job["argv"]]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder / "work", env=env, stdout=log, stderr=log, start_new_session=True
        )

    def end() -> None:
        _end(process.pid)
        process.wait()

    return end


def _end(pid: int) -> None:
    """The process, and those that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


@contextmanager
def forkserver(folder: Path) -> Iterator[Forkserver]:
    path, log = folder / "socket", folder / "forkserver.log"
    environments = folder / "atropos" / "environments"
    shutil.copytree(atropos_python().parents[1] / "environments", environments, ignore=shutil.ignore_patterns("*.png"))
    command = [str(atropos_python()), "-m", "tests.originals.atropos.child", str(path)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=CHECKOUT, env=_variables(folder), stdout=output, stderr=output, start_new_session=True
        )
    try:
        wait_until(lambda: path.exists() or process.poll() is not None, "the packages to load", PRELOAD_TIMEOUT_S)
        assert process.poll() is None, log.read_text()
        yield Forkserver(path, environments)
    finally:
        process.kill()
        process.wait()


def _variables(home: Path) -> dict[str, str]:
    paths = os.pathsep.join(str(CHECKOUT / name) for name in ("src", ""))
    return {"PATH": SETTINGS["PATH"], "HOME": str(home), "PYTHONPATH": paths, **VARIABLES}


async def run(
    row: Row,
    folder: Path,
    tiny: Path,
    forks: Forkserver,
    *,
    whose: str = "stepwell",
    start: Start | None = None,
    until: Collection[str] = (),
) -> Outcome:
    """Until the trainer has the first group, the environment has ended, or one of the stages `until` has. `start` is by
    default that of `forks`."""
    start = start or forks.start
    (folder / "work").mkdir(parents=True)
    async with ScriptedEngine(row) as engine, serve_atropos(LocalPool()) as url, calling(url) as server:
        await server.register(row.batch_size or row.group_size, max_token_len=LONGEST)
        file = forks.environments / row.file
        for name, text in row.beside.items():
            (file.parent / name).parent.mkdir(parents=True, exist_ok=True)
            (file.parent / name).write_text(text)
        names = {"{engine}": f"{engine.url}/v1", "{work}": str(folder / "work"), "{tiny}": str(tiny)}
        words = row.arguments
        if words is None:
            flags = [*_flags(engine.url, url, tiny, row), *(_filled(flag, names) for flag in row.flags)]
            words = [row.command, *(flags if whose == "stepwell" else _as_file(flags, folder))]
        argv = [str(file), *(_filled(word, names) for word in words)]
        variables = {name: _filled(value, names) for name, value in row.variables.items()}
        job = {
            "file": row.file,
            "argv": argv,
            "whose": whose,
            "folder": str(folder),
            "tokenizer": str(tiny),
            "variables": {"HOME": str(folder), **variables},
        }
        end = start(job)
        try:
            group = await _first_group(row, server, folder, until)
        finally:
            end()
    return Outcome(_stages(folder), group, ["python", "-m", "stepwell.envs", *argv], _log(folder))


async def _first_group(row: Row, server: AtroposClient, folder: Path, enough: Collection[str]) -> Group | None:
    """None if the environment ends without one."""
    groups: list[Group] = []
    enough = {*enough, "ended", *(("collect_trajectories",) if row.only_starts else ())}

    async def is_over() -> bool:
        groups.extend(await server.batch() or [])
        return bool(groups) or not enough.isdisjoint(_stages(folder))

    with suppress(TimeoutError):
        async with asyncio.timeout(row.timeout):
            while not await is_over():
                await asyncio.sleep(0.05)
    return groups[0] if groups else None


def _stages(folder: Path) -> dict[str, str]:
    path = folder / "stages.jsonl"
    return dict(json.loads(line) for line in path.read_text().splitlines()) if path.exists() else {}


def _log(folder: Path) -> str:
    path = folder / "log"
    return path.read_text(errors="replace") if path.exists() else ""


def _filled(text: str, names: Mapping[str, str]) -> str:
    for name, value in names.items():
        text = text.replace(name, value)
    return text


def _as_file(flags: Sequence[str], folder: Path) -> list[str]:
    """The same settings for atroposlib, which takes lists and several servers only from a file."""
    settings: Json = {"env": {}, "openai": {}}
    for flag, value in zip(flags[::2], flags[1::2], strict=True):
        section, _, name = flag.removeprefix("--").partition(".")
        if name:
            with suppress(ValueError):
                value = json.loads(value)
            settings[section][name.replace("-", "_")] = value
    settings["openai"] = [settings["openai"]] * 2
    (folder / "settings.yaml").write_text(json.dumps(settings))
    return ["--slurm", "false", "--config", str(folder / "settings.yaml")]


def _flags(engine: str, server: str, tiny: Path, row: Row) -> list[str]:
    flags: dict[str, object] = {
        "--slurm": "false",
        "--openai.base_url": f"{engine}/v1",
        "--openai.model_name": MODEL,
        "--openai.api_key": "none",
        "--env.rollout_server_url": server,
        "--env.tokenizer_name": tiny,
        "--env.use_wandb": "false",
        "--env.group_size": row.group_size,
        "--env.total_steps": 3,
        "--env.max_token_length": 32_000,
        "--env.max_num_workers": 1,
        "--env.steps_per_eval": 1_000_000,
    }
    return [str(word) for flag in flags.items() for word in flag]
