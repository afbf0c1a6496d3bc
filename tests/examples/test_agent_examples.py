"""The examples with agents, run as their READMEs say. A script plays the model, so that what is printed is known."""

from itertools import cycle
from pathlib import Path

import pytest

from rig.agents.process import environment
from rig.docs_pages import CHECKOUT
from rig.fake_engine import Reply, ToolCall
from rig.fake_engine.asking import Json
from stepwell.pool.client.batch import Batch
from tests.examples.conftest import ExampleUser
from tests.examples.folders import missing_lines, shell_block

SOURCE = str(CHECKOUT / "src")
"""Stepwell for the Python of the agents' environment, where it is not installed."""


@pytest.fixture(scope="module")
def agents_bin() -> Path:
    """The programs of the agents' environment, Python with LangGraph and openai-agents among them."""
    return environment() / "bin"


def called(name: str, **arguments: object) -> Reply:
    return Reply(tool_calls=(ToolCall(name, arguments),))


def results(messages: list[Json]) -> list[str]:
    """What tools gave."""
    return [str(message["content"]) for message in messages if message["role"] == "tool"]


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.replace("?", "").split() if word.isdecimal()]


def rollouts(batch: Batch) -> list[tuple[str, list[tuple[int, float]]]]:
    """By group: its name, and of each rollout the number of trainable steps and the reward."""
    found = []
    for group in batch.groups():
        ends = [(len(steps), steps[-1].reward) for steps in group]
        found.append((group[0][0].prompt_uid, sorted((count, reward) for count, reward in ends if reward is not None)))
    return found


def test_openai_agent(user: ExampleUser) -> None:
    endings = cycle(["It is {}.", "It is {}.", "I do not know.", "{}"])

    def script(messages: list[Json]) -> Reply:
        if given := results(messages):
            return Reply(next(endings).format(given[-1]))
        a, b = numbers(messages[0]["content"])
        return called("multiply", a=a, b=b)

    user.running.engine.script = script
    printed = user.run(shell_block("openai_agent", "agent.py"))
    assert missing_lines("openai_agent", printed) == [], printed
    attempts = [(2, 0.0), (2, 1.0), (2, 1.0), (2, 1.0)]
    assert rollouts(user.running.fetch(2)) == [("product-408", attempts), ("product-513", attempts)]


def test_langgraph_agent(user: ExampleUser, agents_bin: Path) -> None:
    endings = cycle(["We have {}.", "We have {}.", "We have {}.", "None, I think."])

    def script(messages: list[Json]) -> Reply:
        if given := results(messages):
            return Reply(next(endings).format(given[-1].split()[-1]))
        return called("in_stock", item="tea" if "tea" in messages[0]["content"] else "salt")

    user.running.engine.script = script
    printed = user.run(shell_block("langgraph_agent", "agent.py"), path=(agents_bin,), PYTHONPATH=SOURCE)
    assert missing_lines("langgraph_agent", printed) == [], printed
    attempts = [(2, 0.0), (2, 1.0), (2, 1.0), (2, 1.0)]
    assert rollouts(user.running.fetch(2)) == [("stock-tea", attempts), ("stock-salt", attempts)]


def test_openai_agents_sdk(user: ExampleUser, agents_bin: Path) -> None:
    desk_says = iter([None, None, "Have you tried another kettle?", None])
    orders = iter([4711, 4711, 4117])

    def script(messages: list[Json]) -> Reply:
        if "questions about the shop" in messages[0]["content"]:
            text = next(desk_says)
            return called("transfer_to_refunds") if text is None else Reply(text)
        if any("was refunded" in result for result in results(messages)):
            return Reply("Your money is on its way.")
        return called("refund", order=next(orders))

    user.running.engine.script = script
    command = shell_block("openai_agents_sdk", "agents_at_a_desk.py")
    printed = user.run(command, path=(agents_bin,), PYTHONPATH=SOURCE)
    assert missing_lines("openai_agents_sdk", printed) == [], printed
    assert rollouts(user.running.fetch(1)) == [("kettle", [(1, 0.0), (3, 0.0), (3, 1.0), (3, 1.0)])]


REPAIRED = """\
def median(numbers):
    ordered, middle = sorted(numbers), len(numbers) // 2
    return ordered[middle] if len(numbers) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
"""


def test_claude_code(user: ExampleUser, agents_bin: Path) -> None:
    commands = iter([f"cat > median.py <<'END'\n{REPAIRED}END", "cat median.py"])

    def script(messages: list[Json]) -> Reply:
        if "Repair median.py" not in str(messages):
            return Reply("Nothing to add.")
        if results(messages):
            return Reply("It is repaired.")
        return called("Bash", command=next(commands), description="Repair it")

    user.running.engine.script = script
    venv = Path(user.shell.env["PATH"].partition(":")[0])
    npm = agents_bin.parent / "npm" / "node_modules" / ".bin"
    printed = user.run(shell_block("claude_code", "fix_a_bug.py"), path=(venv, npm, agents_bin))
    assert missing_lines("claude_code", printed) == [], printed
    ((_, attempts),) = rollouts(user.running.fetch(1))
    assert attempts == [(2, 0.0), (2, 1.0)]


def test_envs(user: ExampleUser) -> None:
    factors = cycle([1, 0])
    user.running.engine.script = lambda messages: Reply(str(sum(numbers(messages[-1]["content"])) * next(factors)))
    printed = user.run(shell_block("envs", "arithmetic.py"))
    assert missing_lines("envs", printed) == [], printed
    assert len((user.shell.folder / "groups" / "groups.jsonl").read_text().splitlines()) == 4
