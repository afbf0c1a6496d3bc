"""examples/custom_reward as its README says, `stepwell up` with reward workers included."""

from pathlib import Path

from rig.fake_engine import Reply
from rig.gateways import free_port
from rig.shells import fresh_shell
from rig.threads import in_thread
from tests.examples.conftest import ScriptedEngine
from tests.examples.folders import EXAMPLES, addresses_replaced, missing_lines, shell_block

ENGINE = "http://127.0.0.1:8001"
"""As the README names it."""
RIGHT = """\
def median(numbers):
    ordered, middle = sorted(numbers), len(numbers) // 2
    return ordered[middle] if len(numbers) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
"""
HALF_RIGHT = "def median(numbers):\n    return sorted(numbers)[len(numbers) // 2]\n"


def fenced(code: str) -> Reply:
    return Reply(f"```python\n{code}```")


def test_custom_reward(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(EXAMPLES)
    ours = {
        "STEPWELL_UP_PORT": str(free_port()),
        "STEPWELL_UP_DASHBOARD_PORT": str(free_port()),
        "STEPWELL_UP_TOKENIZER_PATH": str(tiny_model),
    }
    long = fenced("# a comment\n" * 10 + RIGHT)
    written = iter([fenced(RIGHT), fenced(HALF_RIGHT), Reply("Use the statistics module."), long])
    up, agent = shell_block("custom_reward", "stepwell up"), shell_block("custom_reward", "agent.py")
    with in_thread(ScriptedEngine()) as engine, fresh_shell(tmp_path, **ours) as shell:
        engine.script = lambda messages: next(written)
        printed = shell.run("bash", "-ec", addresses_replaced(up, {ENGINE: engine.url}) + agent, timeout=300)
        assert missing_lines("custom_reward", printed) == [], printed
        assert "4 steps submitted" in shell.run("stepwell", "status")
        shell.run("stepwell", "down")
