"""Every command and every snippet of the README and of docs/ is one that works.

Commands are parsed by the command line itself, with their flags; Python is compiled and what it imports is looked up,
and each page's Python is run by the test that RUN_BY names.
"""

import ast
import inspect
import json
import re
import sqlite3
import tomllib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from pydantic import AliasChoices

from rig import vllm_server
from rig.docs_pages import CHECKOUT, DOCS, Block, Command, blocks, commands, example_pages, pages, prose
from stepwell.cli import command_of
from stepwell.commands import COMMANDS, settings_of
from stepwell.commands.launch_plan import UpSettings
from stepwell.commands.pool import PoolSettings
from stepwell.commands.sections import read_settings
from stepwell.demo import engine
from stepwell.pool import client
from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.client import DataPool
from stepwell.pool.shard.sqlite_journal import SqliteJournal

RUN_BY = {
    "README.md": "tests/e2e/test_readme.py",
    "README.zh.md": "tests/unit/test_docs_readme.py",
    "docs/agents.md": "tests/integration/agents/test_docs.py",
    "docs/bring-your-own-trainer.md": "tests/e2e/test_own_trainer.py",
    "docs/atropos.md": "tests/unit/atropos/test_docs.py",
    "docs/coming-from-claw-r1.md": "tests/integration/agents/test_claw_r1.py",
    "docs/export.md": "tests/integration/exports/test_docs.py",
    "docs/environments.md": "tests/integration/envs/test_examples_docs.py",
    "docs/gateway.md": "tests/integration/gateway/test_docs.py",
    "docs/live.md": "tests/unit/trainers/test_live_docs.py",
    "docs/operations/backup.md": "tests/unit/test_docs_snippets.py",
    "docs/operations/upgrade.md": "tests/unit/test_docs_snippets.py",
    "docs/pool.md": "tests/unit/test_docs_snippets.py",
    "docs/privacy.md": "tests/unit/gateway/recording/test_redaction.py",
    "docs/rewards.md": "tests/integration/rewards/test_docs.py",
    "docs/start.md": "tests/e2e/test_new_user.py",
    "docs/training.md": "tests/unit/trainers/test_docs.py",
}
"""Which test runs a page's Python."""

PROGRAMS = {
    *("curl", "docker", "export", "just", "kubectl", "pip", "printf", "python", "python3", "ray", "stepwell"),
    *("bash", "cd", "chmod", "git", "mkdir", "openssl", "python3.12", "redis-server", "."),
    *("verifiers-env/bin/pip", "harbor-env/bin/pip", "openenv-env/bin/pip", "openenv-env/bin/python"),
}
VLLM_FLAGS = {*engine.FLAGS, *vllm_server.FLAGS, "--model", "--host", "--port"}
FOREIGN_FLAGS = {
    *(flag for flag in VLLM_FLAGS if flag.startswith("--")),
    *(
        "--address",
        "--security-opt",
        "--temp-dir",
        "--rm",
        "--all",
        "--object-store-memory",
        "--runner",
        "--reasoning-parser",
        "--api-key",
        "--slurm",
        "--testing",
        "--enable-lora",
        "--max-lora-rank",
        "--max-loras",
        "--no-deps",
    ),
    *("--help", "--head", "--groups", "--out", "--config", "--kills", "--vllm", "--fix"),
}
"""Of vLLM, Ray, Atropos, ruff, of benchmarks, and of an environment's own command line."""


def flags_of(command: str) -> set[str]:
    names: list[str] = []
    for name, field in settings_of(command).model_fields.items():
        alias = field.validation_alias
        names += map(str, alias.choices) if isinstance(alias, AliasChoices) else [field.alias or name]
    return {f"--{prefix}{name.replace('_', '-')}" for name in names for prefix in ("", "no-")} | {"--help"}


def shell_commands(among: list[Path]) -> Iterator[tuple[Block, Command]]:
    for page in among:
        for block in blocks(page, "bash"):
            for command in commands(block.code):
                yield block, command


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder without a stepwell.toml, and without settings in the environment."""
    monkeypatch.chdir(tmp_path)


def test_every_stepwell_command_is_taken_with_its_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = 0
    for block, command in shell_commands([*pages(), *example_pages()]):
        if not (words := _stepwell_words(command)):
            continue
        name = command_of(words)
        assert name is not None, f"no such command: {block}"
        arguments = words[len(name.split()) :]
        with monkeypatch.context() as patch:
            for variable, value in command.env.items():
                assert variable.lower().removeprefix(_prefix(name)) in settings_of(name).model_fields, str(block)
                patch.setenv(variable, value)
            if "--help" not in arguments:
                read_settings(settings_of(name), arguments, name)
        seen += 1
    assert seen > 20


def _prefix(command: str) -> str:
    return str(settings_of(command).model_config["env_prefix"]).lower()


def _stepwell_words(command: Command) -> list[str]:
    """What comes after `stepwell`, however it is called; a leading assignment may be part of it."""
    words = list(command.words)
    if words[:1] == ["stepwell"]:
        return words[1:]
    if words[:3] == ["python", "-m", "stepwell.gateway"]:
        return ["gateway", *words[3:]]
    return words[3:] if words[:3] == ["python", "-m", "stepwell"] else []


MADE_BY_USERS = ("keys.env", "tls.crt", "tls.key")


def test_every_other_command_is_one_that_can_be_given() -> None:
    recipes = set(re.findall(r"^([a-z][\w-]*)[^:=\n]*:(?!=)", (CHECKOUT / "justfile").read_text(), re.M))
    extras = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for block, command in shell_commands(pages()):
        if not command.words:
            continue
        program, *rest = command.words
        assert program in PROGRAMS or program.startswith(".venv/bin/"), f"what is {program}? {block}"
        if program == "just":
            assert rest[0] in recipes, str(block)
        if program == "pip":
            for extra in re.findall(r"\[([\w,]+)\]", " ".join(rest)):
                assert set(extra.split(",")) <= extras.keys(), str(block)
        if program == "python" and rest[:1] == ["-m"]:
            assert _is_module(rest[1]), f"no module {rest[1]}: {block}"
        for path in re.findall(r"(?:\.ci|deploy|scripts|examples)/[\w./-]+", " ".join(rest)):
            assert (CHECKOUT / path).exists() or path.endswith(MADE_BY_USERS), f"no {path}: {block}"


def _is_module(name: str) -> bool:
    if name.startswith(("vllm.", "verl.")) or name in ("venv", "pytest"):
        return True
    path = CHECKOUT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or path.is_dir() or name.startswith("stepwell")


def test_commands_and_flags_within_sentences_are_real() -> None:
    every_flag = {flag for command in COMMANDS for flag in flags_of(command)} | FOREIGN_FLAGS
    for page in pages():
        for span in re.findall(r"`([^`\n]+)`", prose(page)):
            flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", span))
            words = span.split()
            if words[0] == "stepwell" and len(words) > 1 and words[1].isalpha() and words[1].islower():
                name = command_of(words[1:])
                assert name is not None, f"{page.name}: `{span}`"
                flags -= flags_of(name)
                assert not flags, f"{page.name}: `{span}` has no {flags}"
            assert {flag for flag in flags if not _of_an_environment(flag)} <= every_flag, f"{page.name}: `{span}`"


def _of_an_environment(flag: str) -> bool:
    return flag in ("--env", "--openai")


def python_blocks() -> list[Block]:
    return [block for page in pages() for block in blocks(page, "python")]


def test_python_compiles_and_imports_what_is_there() -> None:
    for block in python_blocks():
        tree = compile(block.code, str(block.page), "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("stepwell"):
                module = import_module(str(node.module))
                assert [name.name for name in node.names if not hasattr(module, name.name)] == [], str(block)
            elif isinstance(node, ast.Import):
                for name in node.names:
                    if name.name.startswith("stepwell"):
                        import_module(name.name)


def test_the_python_of_every_page_is_run_by_a_test() -> None:
    with_python = {str(block.page.relative_to(CHECKOUT)) for block in python_blocks()}
    assert with_python == RUN_BY.keys()
    for page, test in RUN_BY.items():
        source = (CHECKOUT / test).read_text()
        assert Path(page).name in source or "README" in source, f"{test} does not run {page}"


def test_the_reference_has_every_name_that_the_pages_import() -> None:
    reference = (DOCS / "reference" / "python.md").read_text()
    for block in python_blocks():
        for module, names in re.findall(r"^from (stepwell[\w.]*) import (.+)$", block.code, re.M):
            for name in names.split(", "):
                assert f"### {module}.{name}\n" in reference, f"add {module}.{name} to scripts/reference_python.py"


def test_annotations_of_the_reference_keep_the_quotes_of_literals_and_no_others() -> None:
    code = "\n".join(block.code for block in blocks(DOCS / "reference" / "python.md", "text"))
    assert "thumb: Literal['up', 'down'] | None" in code
    without_literals = re.sub(r"Literal\[.*?\]", "", code)
    assert re.findall(r": ['\"].*|-> ['\"].*", without_literals) == []


def test_data_blocks_can_be_read(tmp_path: Path) -> None:
    readers: dict[str, Any] = {"json": json.loads, "yaml": yaml.safe_load, "toml": tomllib.loads}
    for page in pages():
        for language, read in readers.items():
            for block in blocks(page, language):
                assert read(block.code), str(block)


def test_toml_is_what_up_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPWELL_UP_ENGINE", "http://127.0.0.1:8001")
    for page in pages():
        for block in blocks(page, "toml"):
            (tmp_path / "stepwell.toml").write_text(block.code)
            read_settings(UpSettings, [], "stepwell up")


def test_a_journal_is_backed_up_while_it_is_open(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    live = SqliteJournal(tmp_path / "journal" / "data_pool.sqlite", closed_kept=Limits().closed_kept)
    (block,) = blocks(DOCS / "operations" / "backup.md", "python")
    exec(block.code, {})
    live.close()
    with closing(sqlite3.connect(tmp_path / "backup" / "data_pool.sqlite")) as copy:
        assert copy.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert copy.execute("SELECT count(*) FROM groups").fetchone() == (0,)


class Recorded:
    """A DataPool that takes the calls that the real one takes, and remembers them."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., AbstractContextManager[None]]:
        real = inspect.signature(getattr(DataPool, name))

        def call(*args: object, **named: object) -> AbstractContextManager[None]:
            real.bind(self, *args, **named)
            self.called.append(name)
            return nullcontext()

        return call


def test_the_pools_page_makes_calls_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Recorded()
    monkeypatch.setattr(client, "connect", lambda name, *, namespace: pool)
    scope: dict[str, object] = {}
    for block in blocks(DOCS / "pool.md", "python"):
        exec(block.code, scope)
    assert pool.called == ["batch", "set_policy_version", "curate"]


def test_an_upgrade_ends_the_actors_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    monkeypatch.setattr(ray, "init", lambda *, address, namespace: None)
    monkeypatch.setattr(ray, "get_actor", lambda name: name)
    monkeypatch.setattr(ray, "kill", ended.append)
    page = DOCS / "operations" / "upgrade.md"
    (block,) = blocks(page, "python")
    exec(block.code, {})
    (made,) = [command for block in blocks(page, "bash") for command in commands(block.code)]
    settings = read_settings(PoolSettings, made.words[2:], "stepwell pool")
    assert ended == list(PoolPlan(name=settings.name, shards=settings.shards).shard_names())
