"""The README's five-minute start, block by block, as it stands there. Only the engine's address and the ports are the
test's own."""

import re
from pathlib import Path

from rig.gateways import free_port
from rig.shells import Shell
from rig.waiting import wait_until

README = Path(__file__).parents[2] / "README.md"
ENGINE, GATEWAY = "http://127.0.0.1:8001", "http://127.0.0.1:8100"
"""As the README names them."""


PLAIN = """
import os

import anthropic
import openai
import stepwell

client = openai.OpenAI()
model = client.models.list().data[0].id
asked = {"model": model, "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 16}
url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
answers = [
    client.chat.completions.with_raw_response.create(**asked),
    client.responses.with_raw_response.create(model=model, input="Say hello.", max_output_tokens=16),
    anthropic.Anthropic().messages.with_raw_response.create(**asked),
    anthropic.Anthropic(base_url=url, api_key=key).messages.with_raw_response.create(**asked),
]
run = stepwell.connect(url, key=key)
for answer in answers:
    place = answer.headers["x-stepwell-trajectory"]
    print("recorded", place.partition("/")[0], run.feedback(*place.split("/"), 0.75))
"""
"""Plain clients, which know what the printed lines export and nothing else."""
TAKEN = """
from stepwell.pool.client import connect

with connect("data_pool").batch(6, timeout=120) as batch:
    for group in batch.groups():
        for trajectory in group:
            for step in trajectory:
                print("taken", step.trajectory_uid, step.reward)
"""


def installation() -> str:
    return _blocks()[0]


def follow(shell: Shell, engine: str) -> None:
    """Start, the agent twice with four attempts, a trainer, the end, all of it again, and plain clients with what is
    printed; all steps arrive, and no process stays."""
    ours = {ENGINE: engine, GATEWAY: f"http://127.0.0.1:{free_port()}"}
    shell.env["STEPWELL_UP_PORT"] = ours[GATEWAY].rpartition(":")[2]
    shell.env["STEPWELL_UP_DASHBOARD_PORT"] = str(free_port())  # the README has no word of it, and 8200 may be taken
    blocks = (re.sub("|".join(ours), lambda match: ours[match[0]], block) for block in _blocks()[1:])
    start, agent, trainer, end = blocks
    shell.run("bash", "-ec", start)
    for name, program in (("agent.py", agent), ("trainer.py", trainer)):
        (shell.folder / name).write_text(program)
    for _ in range(2):
        shell.run("bash", "-ec", ". .stepwell/env; python agent.py")
    printed = shell.run("bash", "-ec", ". .stepwell/env; python trainer.py").splitlines()
    steps = [line for line in printed if re.match(r"[0-9a-f]{32} 0 \d+ \[", line)]
    assert len(steps) == 4, printed
    assert "8 steps submitted" in shell.run("bash", "-ec", end)
    wait_until(lambda: not shell.pids(), "every process to be gone")
    shell.env["STEPWELL_UP_SESSION_IDLE"] = "5"  # the default is longer than a test may last
    started = shell.run("bash", "-ec", start)
    shell.run("bash", "-ec", ". .stepwell/env; python agent.py")
    _use_plain_clients(shell, started)
    shell.run("bash", "-ec", end)
    wait_until(lambda: not shell.pids(), "every process to be gone again")


def _use_plain_clients(shell: Shell, started: str) -> None:
    """By the lines that `stepwell up` printed: recorded, ended, rewarded, in a batch with what was there before."""
    exports = "\n".join(line for line in started.splitlines() if line.startswith("export "))
    for name, program in (("plain.py", PLAIN), ("taken.py", TAKEN)):
        (shell.folder / name).write_text(program)
    recorded = re.findall(r"recorded (\w+) counted", shell.run("bash", "-ec", f"{exports}\npython plain.py"))
    assert len(set(recorded)) == 4, recorded
    taken = dict(re.findall(r"taken (\w+) (\S+)", shell.run("bash", "-ec", ". .stepwell/env; python taken.py")))
    assert {uid: taken.get(uid) for uid in recorded} == dict.fromkeys(recorded, "0.75")
    assert len(taken) == 12, taken


def _blocks() -> list[str]:
    """Installation, start, agent, trainer, end."""
    section = README.read_text().split("## Five-minute start")[1].split("\n## ")[0]
    found: list[str] = re.findall(r"```(?:bash|python)\n(.*?)```", section, re.S)
    assert len(found) == 5
    assert "pip install" in found[0]
    return found
