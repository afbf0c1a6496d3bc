"""The examples in docs/environments.md, run as they stand there. Only ports, the model and the Ray cluster are ours."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

from stepwell.envs import BaseEnv
from tests.rig.fake_engine import FakeEngine
from tests.rig.gateways import free_port
from tests.rig.group_files import read_lines
from tests.rig.ray_cluster import RayCluster
from tests.rig.threads import in_thread
from tests.rig.waiting import answers, wait_until

PAGE = Path(__file__).parents[3] / "docs" / "environments.md"
WITH_NEMO_GYM, OF_NEMO_GYM = PAGE.parents[1] / "tests" / "e2e" / "test_nemo_gym.py", "PoolTokenSource"
ROOMS = ("POOL", "GATEWAY", "ATROPOS")


def examples(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.S)


def example(language: str, mark: str) -> str:
    """The one block of that language with those words in it."""
    (block,) = [block for block in examples(language) if mark in block]
    return block


class Shell:
    """Runs the page's blocks, in one folder, with ports of its own; ends what they left running."""

    def __init__(self, folder: Path, ports: dict[str, str], env: dict[str, str]) -> None:
        self.folder, self.ports = folder, ports
        self.env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **env}
        self.sessions: list[int] = []
        (folder / "sums.py").write_text(example("python", "class Sums"))

    def run(self, block: str, *, interpreter: str = "bash -ec") -> str:
        ours = re.sub("|".join(self.ports), lambda match: self.ports[match[0]], block.replace("ray start --head\n", ""))
        with (self.folder / "output").open("w+") as output:
            process = subprocess.Popen(
                [*interpreter.split(), ours],
                cwd=self.folder,
                env=self.env,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            self.sessions.append(process.pid)
            status = process.wait(120)
            output.seek(0)
            shown = output.read()
        assert status == 0, shown
        return shown

    def lives(self, session: int) -> bool:
        try:
            os.killpg(session, 0)
        except ProcessLookupError:
            return False
        return True

    def close(self) -> None:
        for sent in (signal.SIGTERM, signal.SIGKILL):
            for session in self.sessions:
                with suppress(ProcessLookupError):
                    os.killpg(session, sent)
            with suppress(AssertionError):
                wait_until(lambda: not any(map(self.lives, self.sessions)), "what the page started to end")


@asynccontextmanager
async def engine(model: str) -> AsyncIterator[str]:
    async with FakeEngine(model=model) as engine:
        yield engine.url


@contextmanager
def shell(folder: Path, model: Path, cluster: RayCluster | None = None, namespace: str = "") -> Iterator[Shell]:
    env = {"MODEL": str(model)}
    if cluster is not None:
        for room in ROOMS:
            env |= {f"STEPWELL_{room}_RAY_ADDRESS": cluster.address, f"STEPWELL_{room}_RAY_NAMESPACE": namespace}
    with in_thread(engine(str(model))) as url:
        opened = Shell(folder, {"http://127.0.0.1:8001": url, "8100": str(free_port()), "8000": str(free_port())}, env)
        try:
            yield opened
        finally:
            opened.close()


def test_the_first_environment_can_be_looked_at(tmp_path: Path, tiny_model: Path) -> None:
    with shell(tmp_path, tiny_model) as sh:
        shown = sh.run(example("bash", "sums.py process"))
    assert "4 groups in groups; to read: groups/groups.html" in shown
    groups = list(read_lines(tmp_path / "groups" / "groups.jsonl"))
    assert [len(group["scores"]) for group in groups] == [4] * 4
    assert "<mark>" in (tmp_path / "groups" / "groups.html").read_text()


def test_it_serves_a_trainer(tmp_path: Path, tiny_model: Path, ray_cluster: RayCluster, namespace: str) -> None:
    with shell(tmp_path, tiny_model, ray_cluster, namespace) as sh:
        sh.run(example("bash", "stepwell pool"))
        for port in ("8100", "8000"):
            wait_until(lambda port=port: answers(f"http://127.0.0.1:{sh.ports[port]}/health"), f"port {port}")  # type: ignore[misc]
        sh.run(example("bash", "sums.py serve --env"))
        environment = sh.sessions[-1]
        printed = sh.run(example("python", "import requests"), interpreter=f"{sys.executable} -c")
        wait_until(lambda: not sh.lives(environment), "the environment to end")
    lines = [line for line in printed.splitlines() if re.match(r"[01] \[", line)]
    assert len(lines) == 4, printed
    assert [line[0] for line in lines] == ["0", "0", "1", "1"]


def test_settings_of_its_own_are_declared_as_described() -> None:
    scope: dict[str, object] = {"__name__": "my_env"}
    exec(example("python", "class MyEnv"), scope)
    kind = scope["MyEnv"]
    assert isinstance(kind, type)
    assert issubclass(kind, BaseEnv)
    config, server = kind.config_init()
    assert config.model_dump()["digits"] == 2
    env = kind(config, [server])  # type: ignore[list-item]
    assert asyncio.run(env.get_next_item()) == 1
    assert env.checkpoint_data() == {"asked": 1}


def test_a_file_and_a_flag_are_read_as_described(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "my.yaml").write_text(example("yaml", "steps_per_eval"))
    with shell(tmp_path, tiny_model) as sh:
        assert "usage: sums.py serve [FLAGS]" in sh.run(example("bash", "my.yaml"))
        process = example("bash", "sums.py process").replace("process", "process --config my.yaml --out more")
        sh.run(process)
    assert [len(group["scores"]) for group in read_lines(tmp_path / "more" / "groups.jsonl")] == [8] * 4


def test_every_block_of_the_page_is_run_here_or_with_its_framework() -> None:
    source = Path(__file__).read_text()
    marks = [*re.findall(r'example\("(?:bash|python)", "(.*?)"\)', source), OF_NEMO_GYM]
    assert OF_NEMO_GYM in WITH_NEMO_GYM.read_text()
    blocks = [block for language in ("bash", "python") for block in examples(language)]
    assert not [block for block in blocks if not any(mark in block for mark in marks) and "pip install" not in block]


def test_every_method_it_lists_is_there() -> None:
    section = PAGE.read_text().split("## What you write")[1].split("\n## ")[0]
    names = re.findall(r"^\| `(\w+)", section, re.M)
    assert len(names) >= 10
    assert [name for name in names if not hasattr(BaseEnv, name)] == []
