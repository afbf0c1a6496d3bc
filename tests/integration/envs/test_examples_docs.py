"""The examples in docs/environments.md, run as they stand there. Only ports and the model are ours."""

import asyncio
import re
import shlex
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from rig.fake_engine import FakeEngine
from rig.gateways import free_port
from rig.group_files import read_lines
from rig.shells import Shell, fresh_shell
from rig.threads import in_thread
from stepwell.envs import BaseEnv, Item
from stepwell.envs import base as cli
from stepwell.envs.distillation import TeacherDistillationEnv, TeacherFlags

PAGE = Path(__file__).parents[3] / "docs" / "environments.md"
WITH_NEMO_GYM, OF_NEMO_GYM = PAGE.parents[1] / "tests" / "e2e" / "test_nemo_gym.py", "PoolTokenSource"


def examples(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.S)


def example(language: str, mark: str) -> str:
    """The one block of that language with those words in it."""
    (block,) = [block for block in examples(language) if mark in block]
    return block


class Distilled(TeacherDistillationEnv):
    async def get_next_item(self) -> Item:
        return None


@asynccontextmanager
async def engine(model: str) -> AsyncIterator[str]:
    async with FakeEngine(model=model) as engine:
        yield engine.url


@contextmanager
def shell(folder: Path, model: Path, **env: str) -> Iterator[Shell]:
    """Where the page's blocks are typed."""
    (folder / "sums.py").write_text(example("python", "class Sums"))
    with in_thread(engine(str(model))) as url, fresh_shell(folder, MODEL=str(model), ENGINE=url, **env) as opened:
        yield opened


def typed(sh: Shell, block: str) -> str:
    return sh.run("bash", "-ec", block.replace("http://127.0.0.1:8001", sh.env["ENGINE"]), timeout=300)


def test_the_first_environment_can_be_looked_at(tmp_path: Path, tiny_model: Path) -> None:
    with shell(tmp_path, tiny_model) as sh:
        shown = typed(sh, example("bash", "sums.py process"))
    assert "4 groups in groups; to read: groups/groups.html" in shown
    groups = list(read_lines(tmp_path / "groups" / "groups.jsonl"))
    assert [len(group["scores"]) for group in groups] == [4] * 4
    assert "<mark>" in (tmp_path / "groups" / "groups.html").read_text()


def test_it_serves_a_trainer(tmp_path: Path, tiny_model: Path) -> None:
    """The three blocks, typed one after the other."""
    ours = {
        "STEPWELL_UP_PORT": str(free_port()),
        "STEPWELL_UP_DASHBOARD_PORT": str(free_port()),
        "STEPWELL_UP_TOKENIZER_PATH": str(tiny_model),
    }
    (tmp_path / "trainer.py").write_text(example("python", "import requests"))
    commands = example("bash", "stepwell up") + example("bash", "sums.py serve --env") + "python trainer.py\nwait\n"
    with shell(tmp_path, tiny_model, **ours) as sh:
        printed = typed(sh, commands)
        sh.run("stepwell", "down")
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
        assert "usage: sums.py serve [FLAGS]" in typed(sh, example("bash", "my.yaml"))
        process = example("bash", "sums.py process").replace("process", "process --config my.yaml --out more")
        typed(sh, process)
    assert [len(group["scores"]) for group in read_lines(tmp_path / "more" / "groups.jsonl")] == [8] * 4


def test_a_teacher_is_named_as_described() -> None:
    _, _, command, *flags = shlex.split(example("bash", "distilled.py serve").replace("\\\n", " "))
    settings = cli.read(Distilled, command, flags, "distilled.py serve")
    assert settings.env.model_dump()["teacher_top_k"] == 8
    assert isinstance(settings.flags, TeacherFlags)
    assert settings.flags.teacher is not None
    assert settings.flags.teacher.model_name == "my-teacher"


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
