"""Claude Code repairs a function: a rollouter starts it, each rollout in a folder of its own, and a test gives the
reward."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepwell.agents.blackbox import BlackBoxAgentFlow
from stepwell.agents.cli_agents import ClaudeCode
from stepwell.agents.dataset import Dataset
from stepwell.agents.rollout import RolloutResult
from stepwell.agents.rollouter import AsyncRollouter

TASKS = [
    {
        "file": "median.py",
        "code": "def median(numbers):\n    return sorted(numbers)[len(numbers) // 2]\n",
        "fault": "median([1, 2, 3, 4]) gives 3. The median of an even count is the mean of the middle two.",
        "test": "from median import median; assert (median([4, 1, 3, 2]), median([5, 1, 9])) == (2.5, 5)",
    }
]


def prompt(task: Mapping[str, Any]) -> str:
    return f"Repair {task['file']}: {task['fault']}"


def prepare(task: Mapping[str, Any], folder: Path) -> None:
    (folder / task["file"]).write_text(task["code"])


def reward(task: Mapping[str, Any], said: str, folder: Path) -> float:
    try:
        done = subprocess.run([sys.executable, "-c", task["test"]], cwd=folder, capture_output=True, timeout=30)
    except subprocess.TimeoutExpired:
        return 0.0
    return float(done.returncode == 0)


def show(result: RolloutResult) -> None:
    print(f"{result.status}  reward {result.reward}  {result.why}".rstrip())


async def main() -> None:
    url, key = os.environ["STEPWELL_URL"], os.environ["STEPWELL_KEY"]
    flow = BlackBoxAgentFlow(url, ClaudeCode(prompt, prepare, reward), key=key, group_size=2, timeout=900)
    rollouter = AsyncRollouter(flow, Dataset(TASKS, epochs=1), gateway=url, concurrency=2, on_result=show)
    tally = await rollouter.run()
    print(f"{tally.groups} of {len(TASKS)} groups complete")


if __name__ == "__main__":
    asyncio.run(main())
