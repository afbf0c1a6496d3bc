"""Claw-R1's own agent flows, unchanged, against the real gateway, a real pool and real reward workers.

One process of verl's environment runs them all, at three gateways: one without keys; one with keys, which are in its
URL; and the same one without a key in the URL. It knows the gateways by their URLs only.
"""

import json
import os
import subprocess
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from stepwell.pool.actors import start_pool
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rig.fake_engine import FakeEngine, Reply, ToolCall
from rig.gateways import gateway_process
from rig.issued_keys import CONTROL
from rig.ray_cluster import RayCluster
from rig.threads import in_thread
from rig.trainers.process import trainer_python
from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.client import DataPool, PoolClient
from stepwell.rewards.runner.messages import Job
from stepwell.rewards.worker import RewardPlan, start_rewards
from stepwell.steps.step import Step
from tests.originals.claw.original import claw_r1

FLOWS = ("blackbox_gsm8k_agent", "single_step_single_turn_agent", "multi_step_agent")
BATCHES = [(FLOWS[0], "train"), (FLOWS[0], "val"), (FLOWS[1], "train"), (FLOWS[2], "train")]
"""What is run at each gateway, one after the other."""
PLACES = ("open", "keyed")
GROUPS = {"17": "72", "18": "5"}
"""The answer to the question of each prompt_uid."""
N = 2
LENGTH = 128
STEPS = {"blackbox_gsm8k_agent": 3, "single_step_single_turn_agent": 1, "multi_step_agent": 2}
CALL = Reply("Let me check. ", (ToolCall("check_answer", {"answer": "72"}),))
"""GSM8KAgent looks for the call in the text, and goes on for three turns while it finds one."""
REWARDS = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "openai/gsm8k", data_source
    return {"score": int(ground_truth) + len(solution_str) / 1000, "index": extra_info["index"]}
"""


@dataclass(frozen=True)
class Ran:
    told: dict[tuple[str, str, str], dict[str, Any]]
    """What the original's worker answered, by place, flow and channel."""
    files: dict[str, str]
    """Of the original's modules."""
    groups: dict[tuple[str, str], list[list[list[Step]]]]
    """By place and channel."""
    left: dict[str, int]
    """Groups that no trainer got."""


def rows(flow: str, channel: str) -> list[dict[str, Any]]:
    """As the original's rollouter gives them to its workers."""
    return [
        {
            "agent_name": flow,
            "uid": uid,
            "channel": channel,
            "policy_version": 0,
            "data_source": "openai/gsm8k",
            "raw_prompt": [{"role": "user", "content": f"question {uid}"}],
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"index": number, "split": channel},
            "index": number,
        }
        for uid, answer in GROUPS.items()
        for number in range(N)
    ]


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def ran(ray_cluster: RayCluster, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    original, folder = claw_r1(), tmp_path_factory.mktemp("claw")
    (folder / "rewards.py").write_text(REWARDS)
    with ExitStack() as stack:
        engine = stack.enter_context(in_thread(FakeEngine(replies=[CALL] * (len(PLACES) * 2 * 3 * N * len(GROUPS)))))
        urls, pools = {}, {}
        for place in PLACES:
            namespace = stack.enter_context(ray_cluster.namespace())
            pools[place] = pool_with_rewards(namespace, folder / "rewards.py", tiny_model)
            keys = {"STEPWELL_GATEWAY_CONTROL_KEYS": CONTROL} if place == "keyed" else {}
            gateway = gateway_process(
                folder / f"{place}.log",
                env=keys,
                data_pool_name="data_pool",
                vllm_addresses=engine.url,
                tokenizer_path=tiny_model,
                prompt_length=2048,
                response_length=LENGTH,
                reward_worker_name="rewards",
                ray_address=ray_cluster.address,
                ray_namespace=namespace,
                tool_calls="text",
            )
            urls[place] = stack.enter_context(gateway).url
        urls |= {"keyed": urls["keyed"].replace("://", f"://:{CONTROL}@"), "no key": urls["keyed"]}
        asked = [(place, flow, channel) for flow, channel in BATCHES for place in urls]
        batches = [{"gateway": urls[place], "rows": rows(flow, channel)} for place, flow, channel in asked]
        answer = run_originals(original, tiny_model, batches, folder / "log")
        groups = {(place, channel): taken(pools[place], channel) for place in pools for channel in ("train", "val")}
        left = {
            place: sum(channel.groups for channel in pool.stats().channels.values()) for place, pool in pools.items()
        }
    return Ran(dict(zip(asked, answer["told"], strict=True)), answer["files"], groups, left)


def pool_with_rewards(namespace: str, functions: Path, model: Path) -> DataPool:
    start_pool(PoolPlan(limits=Limits(group_size=N, require_reward=True)), namespace)
    job = Job(function=f"{functions}:compute_score", tokenizer_path=str(model), timeout=60.0, children=1)
    start_rewards(RewardPlan(name="rewards", job=job), partial(PoolClient, "data_pool", namespace), namespace)
    return DataPool(PoolClient("data_pool", namespace))


def run_originals(original: Path, model: Path, batches: list[dict[str, Any]], log: Path) -> Any:
    asked = {
        "claw_r1": str(original),
        "packages": str(Path(openai.__file__).parents[1]),
        "model": str(model),
        "prompt_length": 2048,
        "response_length": LENGTH,
        "n": N,
        "batches": batches,
    }
    program = Path(__file__).with_name("run_flows.py")
    command = [str(trainer_python("verl")), str(program), json.dumps(asked)]
    env = {**os.environ, "PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("w") as errors:
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=errors, text=True, timeout=300)
    assert done.returncode == 0, log.read_text()[-8000:]
    return json.loads(done.stdout.splitlines()[-1])


def taken(pool: DataPool, channel: str) -> list[list[list[Step]]]:
    """All groups, with the steps that a trainer gets by default."""
    count = len(GROUPS) * sum(channel == of for _, of in BATCHES)
    return pool.fetch_batch(count, channel=channel, timeout=120).groups()


def test_no_module_of_the_original_is_stood_in_for(ran: Ran) -> None:
    assert all(file.startswith(str(claw_r1())) for file in ran.files.values())
    assert {"agent_flow.agent_flow", "blackbox_agent.blackbox_agent_flow", "blackbox_agent.gsm8k_agent"} < {
        name.removeprefix("claw_r1.") for name in ran.files
    }


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("flow", "channel"), BATCHES)
def test_a_flow_says_how_many_steps_it_made(ran: Ran, place: str, flow: str, channel: str) -> None:
    assert ran.told[place, flow, channel]["num_steps"] == [STEPS[flow]] * N * len(GROUPS)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("channel", ["train", "val"])
def test_the_rollouts_of_a_prompt_are_one_group_in_its_channel(ran: Ran, place: str, channel: str) -> None:
    groups = ran.groups[place, channel]
    made = [flow for flow, of in BATCHES if of == channel]
    seen = Counter((group[0][0].prompt_uid, len(group[0])) for group in groups)
    assert seen == Counter((uid, STEPS[flow]) for flow in made for uid in GROUPS)
    for group in groups:
        assert len(group) == N
        assert len({step.prompt_uid for steps in group for step in steps}) == 1
        assert len({steps[0].trajectory_uid for steps in group}) == N
        assert all(split_of(step) == channel for steps in group for step in steps)
    assert ran.left[place] == 0


def split_of(step: Step) -> object:
    extra = step.metadata["extra_info"]
    assert isinstance(extra, dict)
    return extra["split"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("channel", ["train", "val"])
def test_the_steps_are_complete_and_trained_as_they_were_sampled(ran: Ran, place: str, channel: str) -> None:
    for steps in (steps for group in ran.groups[place, channel] for steps in group):
        assert [step.step_index for step in steps] == list(range(len(steps)))
        assert [step.is_last for step in steps] == [False] * (len(steps) - 1) + [True]
        for step in steps:
            assert (step.temperature, step.untrainable) == (1.0, None)
            assert step.response_logprobs is not None
            assert len(step.response_logprobs) == len(step.response_ids)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("channel", ["train", "val"])
def test_the_rewards_are_those_of_its_reward_function(
    ran: Ran, place: str, channel: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    for steps in (steps for group in ran.groups[place, channel] for steps in group):
        text = str(tokenizer.decode(steps[-1].response_ids)).removesuffix("<|im_end|>")
        expected = int(GROUPS[steps[0].prompt_uid]) + len(text) / 1000
        assert steps[-1].reward == pytest.approx(expected)
        assert steps[-1].trajectory_return == pytest.approx(expected)
        assert {step.reward for step in steps[:-1]} <= {None, 0.0}


@pytest.mark.parametrize(("flow", "channel"), BATCHES)
def test_without_the_key_in_the_url_a_flow_is_refused_aloud(ran: Ran, flow: str, channel: str) -> None:
    assert "401 Unauthorized" in ran.told["no key", flow, channel]["failed"]
