"""The examples in docs/gateway.md, run as they stand there. Only the port is the test's own."""

import json
import re
import subprocess
import sys
from pathlib import Path

from stepwell.pool.client import DataPool
from tests.integration.gateway.conftest import StartGateway

PAGE = Path(__file__).parents[3] / "docs" / "gateway.md"


def example(language: str, start: str, part: str = "") -> str:
    """The one block of that language that begins so and has this part."""
    blocks = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.S)
    (block,) = [block for block in blocks if block.startswith(start) and part in block]
    return str(block)


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_curl_opens_a_trajectory_and_the_sdks_record_others(data_pool: DataPool, start_gateway: StartGateway) -> None:
    with start_gateway() as gateway:
        opening = example("bash", "curl", "task-7").replace("http://127.0.0.1:8100", gateway.url)
        opened = json.loads(run("bash", "-c", opening))
        assert opened["base_url"] == f"{gateway.url}/{opened['trajectory_uid']}/task-7/v1"
        code = example("python", "import stepwell") + example("python", "import anthropic")
        said = run(sys.executable, "-c", code.replace("http://127.0.0.1:8100", gateway.url))
    with data_pool.batch(2, timeout=60) as batch:
        steps = batch.steps()
    assert [(step.prompt_uid, step.reward) for step in steps] == [("task-8", 1.0), ("task-9", 1.0)]
    streamed, _, blocks = said.strip().rpartition("\n")
    assert streamed
    assert blocks.startswith("['text'] ")
