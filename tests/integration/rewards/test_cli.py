"""The reward commands as processes: workers beside a real gateway, and functions tried and applied to stored data."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pyarrow.parquet as pq
import pytest
from openai import OpenAI

import stepwell
from rig.builders import make_step
from rig.chatml import render_chat
from rig.fake_engine import FakeEngine
from rig.gateways import gateway_process
from rig.ray_cluster import RayCluster
from rig.threads import in_thread
from rig.vocabulary import encode
from stepwell.pool.client import DataPool, PoolClient
from stepwell.pool.client.batch import batch_from_arrow, make_batch
from stepwell.steps.columns import pack
from tests.integration.rewards.rollouts import written

FUNCTIONS = """
def length(sample):
    assert sample.messages[0] == {"role": "user", "content": "hello"}, sample.messages
    return len(sample.response_text) / 100

def talks(sample):
    if sample.response_text == "8":
        raise ValueError("eight!")
    return float(sample.response_text == sample.metadata["answer"])
"""

Stepwell = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def functions(tmp_path: Path) -> str:
    return written(tmp_path, FUNCTIONS)


@pytest.fixture
def command(tmp_path: Path) -> Stepwell:
    def run(*words: object) -> "subprocess.CompletedProcess[str]":
        line = [sys.executable, "-m", "stepwell", *map(str, words)]
        return subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False)

    return run


@pytest.fixture
def on_ray(command: Stepwell, ray_cluster: RayCluster, namespace: str) -> Stepwell:
    def run(*words: object) -> "subprocess.CompletedProcess[str]":
        return command(*words, "--ray-address", ray_cluster.address, "--ray-namespace", namespace)

    return run


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with in_thread(FakeEngine()) as engine:
        yield engine


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Three trajectories, of which the first is right and the last is more than `talks` can bear."""
    prompt = encode(render_chat([{"role": "user", "content": "2+2?"}]))
    steps = [
        make_step(f"t{n}", "p", step_index=0, prompt_ids=prompt, response_ids=encode(text), metadata={"answer": "4"})
        for n, text in enumerate(("4<|im_end|>", "5", "8"))
    ]
    pq.write_table(make_batch(pack(steps), [3]).to_arrow(), tmp_path / "data.parquet")
    return tmp_path / "data.parquet"


def test_workers_score_what_agents_do_and_what_a_gateway_asks(
    on_ray: Stepwell,
    engine: FakeEngine,
    functions: str,
    ray_cluster: RayCluster,
    namespace: str,
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    assert on_ray("pool", "--require-reward").returncode == 0
    started = on_ray("rewards", "--function", "functions.py:length", "--workers", 2, "--tokenizer-path", tiny_model)
    assert started.returncode == 0, started.stderr
    assert f"2 reward workers are up in Ray namespace '{namespace}'" in started.stderr
    with gateway_process(
        tmp_path / "gateway.log",
        data_pool_name="data_pool",
        vllm_addresses=engine.url,
        tokenizer_path=tiny_model,
        reward_worker_name="reward_loop_worker",
        ray_address=ray_cluster.address,
        ray_namespace=namespace,
    ) as gateway:
        run = stepwell.connect(gateway.url)
        with run.trajectory() as t, OpenAI(base_url=t.base_url, api_key=t.api_key) as agent:
            reply = agent.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hello"}])
        said = reply.choices[0].message.content or ""
        (step,) = DataPool(PoolClient("data_pool", namespace)).fetch_batch(1, timeout=60.0).steps()
        assert (step.reward, step.reward_source) == (len(said) / 100, "functions.py:length")
        ids = {"prompt_ids": step.prompt_ids.tolist(), "response_ids": step.response_ids.tolist()}
        answer = httpx.post(f"{gateway.url}/compute_reward", json=ids, timeout=120.0).json()
        assert answer == {"reward_score": len(said) / 100, "reward_extra_info": {}}
        ids["prompt_ids"] = encode(render_chat([{"role": "user", "content": "goodbye"}]))
        refused = httpx.post(f"{gateway.url}/compute_reward", json=ids, timeout=120.0)
        assert refused.status_code >= 500
        assert "AssertionError" in refused.json()["error"]["message"]


def test_workers_that_cannot_be_started_say_why(on_ray: Stepwell, functions: str) -> None:
    nowhere = on_ray("rewards", "--function", "exact_match")
    assert nowhere.returncode == 1
    assert "no DataPool named 'data_pool'" in nowhere.stderr
    assert on_ray("pool").returncode == 0
    failed = on_ray("rewards", "--function", "functions.py:missing")
    assert failed.returncode == 1
    *warnings, last = failed.stderr.splitlines()
    assert any("does not require rewards, so it offers nothing to score" in line for line in warnings)
    assert last == "stepwell rewards: functions.py has no 'missing'; its functions are: length, talks"


def test_trying_a_function_prints_a_table(command: Stepwell, functions: str, data: Path, tiny_model: Path) -> None:
    done = command("reward", "try", "functions.py:talks", "--on", "data.parquet", "--tokenizer-path", tiny_model)
    head, *lines = done.stdout.splitlines()
    assert head.split() == ["trajectory", "had", "outcome", "score", "seconds"]
    assert [line.split()[:4] for line in lines[:2]] == [["t0", "none", "score", "1"], ["t1", "none", "score", "0"]]
    assert lines[2].endswith("ValueError: eight! (functions.py, line 8, in talks)")
    assert len(lines) == 3
    assert done.returncode == 1
    assert done.stderr == ("stepwell reward try: 2 scored (mean 0.5, from 0 to 1); 1 without a score (error: 1)\n")


def test_a_built_in_is_tried_with_its_options(command: Stepwell, data: Path, tiny_model: Path) -> None:
    on = ("--on", data, "--tokenizer-path", tiny_model)
    done = command("reward", "try", "regex_match", "--options", '{"pattern": "[58]"}', *on)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "3 scored (mean 0.6667, from 0 to 1)"
    refused = command("reward", "try", "regex_match", "--options", '{"patern": "[58]"}', *on)
    assert refused.returncode == 1
    assert "patern" in refused.stderr


def test_texts_without_a_tokenizer_say_what_is_missing(command: Stepwell, data: Path) -> None:
    done = command("reward", "try", "exact_match", "--on", data)
    assert done.returncode == 1
    assert "give --tokenizer-path" in done.stdout


def test_rescoring_writes_the_next_revision(command: Stepwell, data: Path, tiny_model: Path, tmp_path: Path) -> None:
    first = command("rescore", "exact_match", "--from", data, "--to", "one", "--tokenizer-path", tiny_model)
    assert first.returncode == 0, first.stderr
    again = command("rescore", "number_match", "--from", "one", "--to", "two", "--tokenizer-path", tiny_model)
    assert again.stdout.splitlines() == ["wrote data.parquet", "3 scored (mean 0.3333, from 0 to 1)"]
    for folder, source, revision in (("one", "exact_match", 1), ("two", "number_match", 2)):
        steps = batch_from_arrow(pq.read_table(tmp_path / folder / "data.parquet")).steps()
        assert [step.reward for step in steps] == [1.0, 0.0, 0.0]
        assert {(step.reward_source, step.reward_revision) for step in steps} == {(source, revision)}
