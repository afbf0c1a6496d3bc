"""One command for vLLM: whoever reads a page, an example or a help text finds the same, with named additions only."""

import re
import shlex
from collections.abc import Iterator
from itertools import chain, combinations
from pathlib import Path
from typing import NamedTuple

import pytest

from rig import vllm_server
from rig.docs_pages import CHECKOUT
from stepwell.commands.launch_plan import UpSettings
from stepwell.commands.processes import HOW_TO_START
from stepwell.demo import engine
from stepwell.engines.vllm import VllmEngine
from stepwell.engines.vllm_control import ADDITIONS, CPU_PROGRAM, base_flags, one_line

PLACES = (
    "README*.md",
    "docs/**/*.md",
    "examples/**/*",
    "deploy/**/*",
    "src/**/*.py",
    "benchmarks/**/*",
    "scripts/**/*",
)
PROGRAM = rf"(?:vllm serve|{re.escape(CPU_PROGRAM)})"
START = re.compile(rf"(?P<command>(?:[A-Z_]+=\S+ +)*{PROGRAM} (?!-)[^\n`]+)")
"""A program and a model: `vllm serve --help` starts nothing."""
MUST_SHOW = ("README.md", "README.zh.md", "docs/start.md", "docs/gateway.md", "docs/training.md", "examples/README.md")


class Typed(NamedTuple):
    place: str
    command: str


def commands(text: str, place: str) -> Iterator[Typed]:
    for found in START.finditer(re.sub(r"\\\\?\n\s*", "", text)):
        yield Typed(place, found["command"].strip().removesuffix('"""').removesuffix("&").strip())


def files() -> list[Path]:
    found = {path for place in PLACES for path in CHECKOUT.glob(place) if path.is_file()}
    return sorted(path for path in found if path.suffix in (".md", ".py", ".sh", ".toml", ".yaml", ".yml", ""))


def typed() -> list[Typed]:
    return [found for path in files() for found in commands(path.read_text(), str(path.relative_to(CHECKOUT)))]


def normalised(command: str) -> list[str]:
    """Its words, with the names of model and parser that BASE has, and `vllm serve` as the program."""
    words = shlex.split(command.replace(CPU_PROGRAM, "vllm serve"))
    words[words.index("serve") + 1] = "MODEL"
    if "--tool-call-parser" in words:
        words[words.index("--tool-call-parser") + 1] = "PARSER"
    return words


def with_additions(names: tuple[str, ...]) -> list[str]:
    words = list(chain.from_iterable(ADDITIONS[name] for name in names))
    variables = [word for word in words if "=" in word and not word.startswith("-")]
    return [*variables, *normalised(one_line()), *(word for word in words if word not in variables)]


ALLOWED = [with_additions(names) for count in range(3) for names in combinations(ADDITIONS, count)]


@pytest.mark.parametrize("found", typed(), ids=lambda found: found.place)
def test_a_command_is_the_base_with_named_additions_only(found: Typed) -> None:
    assert normalised(found.command) in ALLOWED, found.command


def test_the_pages_that_must_have_it_have_it() -> None:
    seen = {found.place for found in typed()}
    assert seen >= set(MUST_SHOW), seen
    assert {f"examples/{name}/README.md" for name in ("trl", "verl", "tinker")} <= seen


@pytest.mark.parametrize(
    "other",
    [
        "vllm serve MODEL --port 8001 --logprobs-mode processed_logprobs",
        one_line().replace("VLLM_SERVER_DEV_MODE=1 ", ""),
        f"{one_line()} --max-model-len 2048",
        one_line().replace("--enable-scale-out ", ""),
    ],
)
def test_another_command_would_be_noticed(other: str) -> None:
    (found,) = commands(f"Type `{other}` first.", "page")
    assert normalised(found.command) not in ALLOWED


def test_up_says_it_in_its_help_and_while_it_waits() -> None:
    (shown,) = commands(UpSettings.__doc__ or "", "help")
    assert normalised(shown.command) == with_additions(())
    assert normalised(HOW_TO_START) == with_additions(())


def test_the_demo_and_the_tests_start_vllm_with_it() -> None:
    for flags in (engine.FLAGS, vllm_server.FLAGS):
        at = flags.index(base_flags("hermes")[0])
        assert flags[at : at + len(base_flags("hermes"))] == base_flags("hermes")
        assert {"--worker-extension-cls", *ADDITIONS["CPU"]} <= set(flags)
    for environment in (engine.ENVIRONMENT, vllm_server.ENVIRONMENT):
        assert environment["VLLM_SERVER_DEV_MODE"] == "1"


def test_every_flag_that_is_advised_is_part_of_it() -> None:
    advised = set(re.findall(r"--[a-z][a-z-]+|\b[A-Z]+_[A-Z_]+=1", " ".join(VllmEngine.advice.values())))
    assert "--enable-auto-tool-choice" in advised
    assert advised <= set(shlex.split(one_line()))
