"""The agents, in one table, and how each is run."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rig.agents.process import in_time, installed, output_of
from stepwell.agents.cli_agents import CommandLineHarness, ModelAccess, QwenCode

PROGRAMS = Path(__file__).parent / "programs"


@dataclass(frozen=True, slots=True)
class Agent:
    name: str
    run: Callable[[ModelAccess, str, Path, Path], str]
    """Given the gateway, a prompt, the folder to work in and a HOME, does the task and gives what the agent says."""
    read_tool: str
    """Its tool that reads a file, and that tool's one argument."""
    path_argument: str
    side_calls: tuple[str, ...] = ()
    """The kinds of calls it makes beside a task."""


def run_openai_agents(access: ModelAccess, prompt: str, folder: Path, home: Path) -> str:
    return _run_program("with_openai_agents.py", access, prompt, folder, home)


def run_langgraph(access: ModelAccess, prompt: str, folder: Path, home: Path) -> str:
    return _run_program("with_langgraph.py", access, prompt, folder, home)


def run_qwen_code(access: ModelAccess, prompt: str, folder: Path, home: Path) -> str:
    said = _run_harness(QwenCode(str, **installed(QwenCode)), access, prompt, folder, home)
    # it looks for memories only after a turn without tools
    going_on = QwenCode(str, arguments=["--continue"], **installed(QwenCode))
    _run_harness(going_on, access, "Thank you.", folder, home)
    return said


AGENTS = (
    Agent("openai-agents", run_openai_agents, "read_file", "path"),
    Agent("langgraph", run_langgraph, "read_file", "path"),
    Agent("qwen-code", run_qwen_code, "read_file", "file_path", side_calls=("memory",)),
)


def _run_program(name: str, access: ModelAccess, prompt: str, folder: Path, home: Path) -> str:
    told = {"BASE_URL": access.base_url, "API_KEY": access.api_key, "MODEL": access.model, "PROMPT": prompt}
    told["LANGSMITH_TRACING"] = "false"
    return output_of(PROGRAMS / name, folder=folder, home=home, settings=told)


def _run_harness(harness: CommandLineHarness, access: ModelAccess, prompt: str, folder: Path, home: Path) -> str:
    return in_time(harness.run(access, prompt, workdir=folder, home=home))
