"""The examples in docs/rewards.md, run as they stand there. Only the data, the model and the ports are the tests'."""

import ast
import asyncio
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rig.builders import make_step
from rig.chatml import render_chat
from rig.fake_engine import FakeEngine
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from rig.ray_cluster import RayCluster
from rig.threads import in_thread
from rig.vocabulary import encode
from stepwell.pool.api.scoring import Score
from stepwell.pool.client import DataPool, PoolClient
from stepwell.pool.client.batch import make_batch
from stepwell.rewards.builtin.table import BUILT_IN, CODE_FACTORIES, COMPOSING_FACTORIES, FACTORIES
from stepwell.rewards.loading import load
from stepwell.steps.columns import pack
from tests.unit.rewards.texts import answered

PAGE = Path(__file__).parents[3] / "docs" / "rewards.md"


def examples(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.S)


def example(language: str, mark: str) -> str:
    """The one block of that language with those words in it."""
    (block,) = [block for block in examples(language) if mark in block]
    return block


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the function, and data whose first answer is right."""
    (tmp_path / "my_rewards.py").write_text(example("python", "def brief"))
    prompt = encode(render_chat([{"role": "user", "content": "2+2?"}]))
    steps = [
        make_step(f"t{n}", "p", step_index=0, prompt_ids=prompt, response_ids=encode(text), metadata={"answer": "4"})
        for n, text in enumerate(("4", "5"))
    ]
    table = make_batch(pack(steps), [2]).to_arrow()
    pq.write_table(table, tmp_path / "data.parquet")
    (tmp_path / "archive").mkdir()
    pq.write_table(table, tmp_path / "archive" / "pool-1.parquet")
    return tmp_path


def run(block: str, folder: Path, tiny_model: Path, **env: str) -> str:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    given = {**os.environ, "MODEL": str(tiny_model), "PATH": path, **env}
    done = subprocess.run(["bash", "-ec", block], cwd=folder, env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_first_function_is_tried_summed_and_applied_anew(folder: Path, tiny_model: Path) -> None:
    tried = run(example("bash", "reward try my_rewards"), folder, tiny_model)
    assert tried.splitlines()[-1] == "2 scored (mean 0.5, from 0 to 1)"
    summed = run(example("bash", "weighted_sum"), folder, tiny_model)
    assert "answer 1, brief 1" in summed
    assert summed.splitlines()[-1] == "2 scored (mean 0.75, from 0 to 1.5)"
    run(example("bash", "rescore"), folder, tiny_model)
    assert pq.read_table(folder / "archive-2" / "pool-1.parquet")["reward"].to_pylist() == [1.0, 0.0]


def test_workers_start_as_described(folder: Path, tiny_model: Path, ray_cluster: RayCluster, namespace: str) -> None:
    env: dict[str, str] = {}
    for room in ("POOL", "REWARDS"):
        env |= {f"STEPWELL_{room}_RAY_ADDRESS": ray_cluster.address, f"STEPWELL_{room}_RAY_NAMESPACE": namespace}
    run(example("bash", "stepwell rewards --function my_rewards"), folder, tiny_model, **env)

    async def rollout() -> None:
        ids = encode("4")
        step = make_step(step_index=0, is_last=True, response_ids=ids, metadata={"answer": "4"})
        await PoolClient("data_pool", namespace).submit_steps([step], channel="train")

    asyncio.run(rollout())
    (step,) = DataPool(PoolClient("data_pool", namespace)).fetch_batch(1, timeout=60.0).steps()
    assert (step.reward, step.reward_source) == (1.0, "my_rewards.py:brief")


async def test_the_second_function_gives_a_score(tmp_path: Path) -> None:
    (tmp_path / "more.py").write_text(example("python", "async def graded"))
    function = load(f"{tmp_path / 'more.py'}:graded")
    assert function.is_async
    assert await function.call(None) == Score(1.5, {"style": 0.5, "facts": 1.0}, notes="why, in words")  # type: ignore[arg-type, misc]


@asynccontextmanager
async def serving(pool: LocalPool) -> AsyncIterator[str]:
    async with FakeEngine() as engine, serve_gateway(pool, [engine.url]) as url:
        yield url


ASKING = """
    OpenAI(base_url=t.base_url, api_key=t.api_key).chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hello"}]
    )
"""


def test_feedback_is_given_as_described() -> None:
    pool = LocalPool()
    block = "from openai import OpenAI\n" + example("python", "run.feedback").replace("\n    ...\n", ASKING)
    with in_thread(serving(pool)) as url:
        program = block.replace("http://127.0.0.1:8100", url)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    assert [(step.reward, step.reward_source) for step in pool.taken()] == [(1.0, "thumbs")]


def test_the_judge_and_the_reward_model_can_be_made_with_the_options_shown() -> None:
    judge, reward_model, rules, evidence, next_judge = (json.loads(block) for block in examples("json"))
    assert not load("next_state", rules).is_async
    assert evidence["rule"] == "correction"
    assert load("next_state", next_judge).is_async
    assert load("judge", judge).is_async
    assert load("reward_model", reward_model).is_async


SOLUTION = """
def top(xs, n): return sorted(xs, reverse=True)[:n]
def sort_in_place(xs): xs.sort()
class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x)
    def pop(self): return self.items.pop()
def apply(f, xs): return [f(x) for x in xs]
class Node:
    def __init__(self, value, left=None, right=None): self.left, self.right = left, right
def height(n): return 0 if n is None else 1 + max(height(n.left), height(n.right))
async def fetch(n): return n + 1
"""


def test_tests_of_generated_code_are_written_as_shown() -> None:
    tests = [*ast.literal_eval(example("python", "sort_in_place"))["tests"], example("python", "in_candidate(")]
    function: Any = load("python_tests", {"seconds": 60.0})
    given = function.call(answered(f"```python\n{SOLUTION}\n```", tests=tests))
    assert (given.value, given.notes) == (1.0, "")


def test_every_built_in_is_listed_with_all_its_options() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .* \| ([^|]*) \|$", PAGE.read_text(), re.M)
    listed = {name: set(re.findall(r"`(\w+)`", options)) for name, options in rows if name in BUILT_IN}
    factories = (*FACTORIES, *COMPOSING_FACTORIES, *CODE_FACTORIES)
    assert listed == {made.__name__: set(inspect.signature(made).parameters) - {"load", "level"} for made in factories}
