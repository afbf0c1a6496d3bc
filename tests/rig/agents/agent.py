"""The agents, in one table, and how each is run."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.rig.agents.process import MODEL, Access, environment, output_of

PROGRAMS = Path(__file__).parent / "programs"

NOWHERE = "http://127.0.0.1:9"
"""A proxy that is not there: opencode looks for plugins on the internet, which no setting of its own forbids."""


@dataclass(frozen=True, slots=True)
class Agent:
    name: str
    run: Callable[[Access, str, Path, Path], str]
    """Given the gateway, a prompt, the folder to work in and a HOME, does the task and gives what the agent says."""
    read_tool: str
    """Its tool that reads a file, and that tool's one argument."""
    path_argument: str
    side_calls: tuple[str, ...] = ()
    """The kinds of calls it makes beside a task."""


def run_openai_agents(access: Access, prompt: str, folder: Path, home: Path) -> str:
    return _run_program("with_openai_agents.py", access, prompt, folder, home)


def run_langgraph(access: Access, prompt: str, folder: Path, home: Path) -> str:
    return _run_program("with_langgraph.py", access, prompt, folder, home)


def run_qwen_code(access: Access, prompt: str, folder: Path, home: Path) -> str:
    settings = {
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "general": {"enableAutoUpdate": False},
        "security": {"auth": {"selectedType": "openai"}},
    }
    _write_json(home / ".qwen" / "settings.json", settings)
    told = {"OPENAI_BASE_URL": access.base_url, "OPENAI_API_KEY": access.api_key, "OPENAI_MODEL": MODEL}
    said = output_of(_cli("qwen"), "-p", prompt, folder=folder, home=home, settings=told)
    # it looks for memories only after a turn without tools
    output_of(_cli("qwen"), "--continue", "-p", "Thank you.", folder=folder, home=home, settings=told)
    return said


def run_opencode(access: Access, prompt: str, folder: Path, home: Path) -> str:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": access.base_url, "apiKey": access.api_key},
        "models": {MODEL: {}},
    }
    settings = {
        "autoupdate": False,
        "share": "disabled",
        "model": f"stepwell/{MODEL}",
        "provider": {"stepwell": provider},
    }
    _write_json(home / ".config" / "opencode" / "opencode.json", settings)
    told = {"OPENCODE_DISABLE_MODELS_FETCH": "1", "HTTPS_PROXY": NOWHERE}
    return output_of(_cli("opencode"), "run", prompt, folder=folder, home=home, settings=told)


AGENTS = (
    Agent("openai-agents", run_openai_agents, "read_file", "path"),
    Agent("langgraph", run_langgraph, "read_file", "path"),
    Agent("qwen-code", run_qwen_code, "read_file", "file_path", side_calls=("memory",)),
    Agent("opencode", run_opencode, "read", "filePath", side_calls=("title",)),
)


def _run_program(name: str, access: Access, prompt: str, folder: Path, home: Path) -> str:
    told = {"BASE_URL": access.base_url, "API_KEY": access.api_key, "MODEL": MODEL, "PROMPT": prompt}
    told["LANGSMITH_TRACING"] = "false"
    return output_of(environment() / "bin" / "python", PROGRAMS / name, folder=folder, home=home, settings=told)


def _cli(name: str) -> Path:
    return environment() / "npm" / "node_modules" / ".bin" / name


def _write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(value))
