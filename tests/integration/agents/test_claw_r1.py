"""White-box flows with Claw-R1's interface, run as Stepwell's own: a real gateway and the fake engine."""

import ast
import asyncio
import re
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import orjson
import pytest

import stepwell.agents.claw_r1 as ours
from rig.chatml import render_chat
from rig.fake_engine import FakeEngine, Reply
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from rig.vocabulary import encode
from stepwell.agents.claw_r1 import AgentFlowBase, ClawR1Flow, FlowConfig, Step, provide_modules, register
from stepwell.agents.dataset import Dataset
from stepwell.agents.rollout import RolloutStatus
from stepwell.agents.rollouter import AsyncRollouter
from stepwell.errors import BadRequest
from stepwell.pool.api.scoring import RewardRequest, RewardScore
from tests.originals.claw.original import claw_r1

GSM8K: dict[str, Any] = {
    "prompt": [{"role": "user", "content": "How many?"}],
    "data_source": "openai/gsm8k",
    "reward_model": {"style": "rule", "ground_truth": "72"},
}
"""A row of the dataset, with the columns that verl's script makes."""
PAGE = Path(__file__).parents[3] / "docs" / "coming-from-claw-r1.md"
TOP_LEVEL_AWAIT = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
CONFIG = {"actor_rollout_ref": {"rollout": {"prompt_length": 8192, "response_length": 64}}}


class Tokenizer:
    """The tiny model's, as transformers' has it."""

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, **how: Any
    ) -> list[int]:
        assert (how["tokenize"], how["return_dict"]) == (True, False)
        text = render_chat(list(messages), how["tools"] or (), add_generation_prompt)
        return encode(text)

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return f"{len(ids)} tokens"


class Worker:
    def __init__(self) -> None:
        self.asked: list[RewardRequest] = []

    async def compute_reward(self, request: RewardRequest) -> RewardScore:
        self.asked.append(request)
        return RewardScore(0.75, {"acc": True})

    async def check(self) -> None: ...


class TwoTurns(AgentFlowBase):
    """Written as Claw-R1's flows are: own uids, a step for each turn, the last one with a reward."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> int:
        trajectory_uid, messages = uuid4().hex, list(kwargs["raw_prompt"])
        for turn in range(2):
            prompt_ids = await self.apply_chat_template(messages)
            done = await self.gateway_generate(prompt_ids=prompt_ids, sampling_params=sampling_params)
            step = Step(
                prompt_ids=prompt_ids,
                response_ids=done["token_ids"][: self.config.actor_rollout_ref.rollout.get("cut", 64)],
                trajectory_uid=trajectory_uid,
                prompt_uid=str(kwargs["uid"]),
                step_index=turn,
                is_last=turn == 1,
                metadata={"turn": turn},
            )
            step.rollout_log_probs = done["log_probs"][: len(step.response_ids)]
            if turn == 1:
                step.reward = float(turn)
            await self.gateway_submit_steps([step], channel=kwargs["channel"])
            messages.append({"role": "assistant", "content": self.tokenizer.decode(done["token_ids"])})
        return 2


def flow_at(gateway: str, flow: type[AgentFlowBase], **more: Any) -> ClawR1Flow:
    given = {"tokenizer": Tokenizer(), "config": CONFIG, "n_rollouts": 2, "sampling_params": {"temperature": 0.7}}
    return ClawR1Flow(gateway, flow, **{**given, **more})


async def test_a_flow_of_claw_r1_fills_groups_as_one_of_ours(gateway: str, pool: LocalPool, engine: FakeEngine) -> None:
    engine.weight_version = "5"
    counts = await AsyncRollouter(flow_at(gateway, TwoTurns), Dataset([GSM8K, GSM8K]), gateway=gateway).run(groups=2)
    assert (counts.groups, dict(counts.rollouts)) == (2, {RolloutStatus.COMPLETED: 4})
    assert not counts.rewards  # the number of steps is no reward
    for steps in (pool.taken(), pool.taken()):
        assert [step.step_index for step in steps] == [0, 1, 0, 1]
        assert len({step.trajectory_uid for step in steps}) == 2
        assert len({step.prompt_uid for step in steps}) == 1
        assert [step.reward for step in steps] == [None, 1.0] * 2
        assert all((step.temperature, step.policy_version, step.model) == (0.7, 5, "tiny") for step in steps)
        assert {"data_source", "reward_model", "turn"} < set(steps[0].metadata)


async def test_the_python_of_the_page_rolls_out_until_it_is_stopped(
    gateway: str, pool: LocalPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.jsonl").write_bytes(orjson.dumps(GSM8K))
    monkeypatch.chdir(tmp_path)
    imports, rolling = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    scope = {"GATEWAY": gateway, "KEY": "", "MyFlow": TwoTurns, "tokenizer": Tokenizer()}
    exec(imports, scope)
    assert scope["AgentFlowBase"] is AgentFlowBase
    code = compile(rolling.replace("tokenizer=", "config=CONFIG, tokenizer="), str(PAGE), "exec", TOP_LEVEL_AWAIT)
    running = asyncio.ensure_future(eval(code, {**scope, "CONFIG": CONFIG}))
    steps = list((await pool.fetch_batch(1, timeout=60)).steps())
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert [step.step_index for step in steps] == [0, 1] * 5


async def test_a_shortened_response_keeps_the_versions_of_its_tokens(
    gateway: str, pool: LocalPool, engine: FakeEngine
) -> None:
    engine.weight_version = "5"
    config = {"actor_rollout_ref": {"rollout": {"cut": 3}}}
    async with flow_at(gateway, TwoTurns, n_rollouts=1, config=config) as flow:
        await flow.rollout(GSM8K, "p")
    for step in pool.taken():
        assert (len(step.response_ids), step.temperature) == (3, 0.7)
        assert [tuple(span) for span in step.version_spans] == [(5, 0, 3)]


class Unused(AgentFlowBase):
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> int:
        raise AssertionError("the sample names another flow")


async def test_the_agent_name_of_a_sample_chooses_a_registered_flow(
    gateway: str, pool: LocalPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours, "REGISTERED", {})
    register("two_turns")(TwoTurns)
    async with flow_at(gateway, Unused, n_rollouts=1) as flow:
        assert (await flow.rollout({**GSM8K, "agent_name": "two_turns"}, "p")).is_completed
        failed = await flow.rollout({**GSM8K, "agent_name": "of_tomorrow"}, "q")
    assert "no flow is registered as 'of_tomorrow'; there are two_turns" in failed.why
    assert len(pool.taken()) == 2


async def test_steps_in_another_channel_or_of_two_trajectories_are_refused(gateway: str, pool: LocalPool) -> None:
    class Wrong(AgentFlowBase):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> int:
            step = Step(prompt_ids=[1], response_ids=[2])
            with pytest.raises(BadRequest, match="in the channel 'train', and not in 'val'"):
                await self.gateway_submit_steps([step], channel="val")
            with pytest.raises(BadRequest, match="makes one trajectory in each run"):
                await self.gateway_submit_steps([step, Step([1], [2], trajectory_uid="b")])
            with pytest.raises(BadRequest, match="cannot have images"):
                image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
                await self.process_vision_info([image])
            return 0

    async with flow_at(gateway, Wrong) as flow:
        assert (await flow.rollout(GSM8K, "p")).status is RolloutStatus.EMPTY
    assert pool.rules.stats().submitted == 0


@pytest.mark.parametrize("kept_as", [list, tuple, np.array])
async def test_a_step_has_the_temperature_at_which_its_own_log_probabilities_were_sampled(
    gateway: str, pool: LocalPool, engine: FakeEngine, kept_as: Callable[[Any], Any]
) -> None:
    """The same tokens are generated greedily afterwards, as a baseline."""

    class WithBaseline(AgentFlowBase):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> int:
            prompt_ids = await self.apply_chat_template(kwargs["raw_prompt"])
            done, _ = [await self.gateway_generate(prompt_ids, {"temperature": each}) for each in (0.7, 0.0)]
            response_ids, logprobs = kept_as(done["token_ids"][:-1]), kept_as(done["log_probs"][:-1])
            return await self.gateway_submit_steps([Step(kept_as(prompt_ids), response_ids, 1.0, None, logprobs)])

    engine.replies.extend([Reply("72"), Reply("72")])
    async with flow_at(gateway, WithBaseline, n_rollouts=1) as flow:
        assert (await flow.rollout(GSM8K, "p")).is_completed
    (step,) = pool.taken()
    assert (step.temperature, step.untrainable) == (0.7, None)


async def test_several_steps_with_one_index_are_refused_instead_of_lost(gateway: str, pool: LocalPool) -> None:
    class Uncounted(AgentFlowBase):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> int:
            first = Step([1], [2], reward=1.0)
            assert [await self.gateway_submit_steps([first]) for _ in range(2)] == [1, 0]  # a retry
            with pytest.raises(BadRequest, match="two steps of this run have the step_index 0.*: count them"):
                await self.gateway_submit_steps([Step([1, 2, 3], [4])])
            return await self.gateway_submit_steps([Step([1, 2, 3], [4], step_index=1)])

    async with flow_at(gateway, Uncounted, n_rollouts=1) as flow:
        result = await flow.rollout(GSM8K, "p")
    assert (result.status, result.failure, result.why) == (RolloutStatus.COMPLETED, None, "")
    assert [step.step_index for step in pool.taken()] == [0, 1]


async def test_a_flow_by_itself_submits_under_the_uids_of_its_steps(gateway: str, pool: LocalPool) -> None:
    flow = TwoTurns(gateway_url=gateway, tokenizer=Tokenizer(), trainer_config=FlowConfig(CONFIG))
    assert await flow.run({"temperature": 1.0}, uid=17, channel="train", raw_prompt=GSM8K["prompt"]) == 2
    assert [(step.prompt_uid, step.is_last, step.temperature) for step in pool.taken()] == [
        ("17", False, 1.0),
        ("17", True, 1.0),
    ]


async def test_without_the_system_prompt_only_the_messages_are_left() -> None:
    flow = TwoTurns(tokenizer=Tokenizer())
    whole = await flow.apply_chat_template(GSM8K["prompt"])
    assert (
        await flow.apply_chat_template(GSM8K["prompt"], remove_system_prompt=True) == whole[len(flow.system_prompt) :]
    )


def test_a_missing_setting_is_named() -> None:
    assert FlowConfig(CONFIG).actor_rollout_ref.rollout.prompt_length == 8192
    with pytest.raises(AttributeError, match=r"no 'max_turns'; give it as ClawR1Flow\(config="):
        _ = FlowConfig(CONFIG).actor_rollout_ref.max_turns


ITS_FILES = [("single_step_single_turn_agent_flow.py", 1), ("multi_step_agent_flow.py", 2)]


@pytest.mark.parametrize(("file", "turns"), ITS_FILES)
async def test_its_own_white_box_files_run_on_our_base_class(
    file: str, turns: int, pool: LocalPool, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no import changed. The base class, which theirs takes from verl, is ours."""
    source = claw_r1() / "claw_r1" / "agent_flow" / file
    monkeypatch.setattr(ours, "REGISTERED", {})
    flow_class = loaded(source, monkeypatch)
    worker = Worker()
    serving = serve_gateway(
        pool, [engine.url], prompt_length=8192, rewards=worker, load_tokenizer=lambda _: Tokenizer()
    )
    async with serving as gateway, flow_at(gateway, flow_class) as flow:
        for _ in range(2):
            assert (await flow.rollout(GSM8K, "17")).is_completed
    steps = pool.taken()
    assert [step.step_index for step in steps] == [*range(turns)] * 2
    assert {step.prompt_uid for step in steps} == {"17"}
    assert [request.dataset_fields["reward_model"] for request in worker.asked] == [GSM8K["reward_model"]] * (
        2 if turns > 1 else 0
    )


def loaded(source: Path, monkeypatch: pytest.MonkeyPatch) -> type[AgentFlowBase]:
    """The flow that a file registers."""
    for name in ours.MODULES:
        monkeypatch.setitem(sys.modules, name, ours)
    provide_modules()
    runpy.run_path(str(source))
    (flow,) = ours.REGISTERED.values()
    return flow


@pytest.mark.parametrize(
    "line",
    [
        "from claw_r1.agent_flow.agent_flow import AgentFlowBase as found",
        "from claw_r1.agent_flow import agent_flow; found = agent_flow.AgentFlowBase",
        "import claw_r1.agent_flow.agent_flow as own; found = own.AgentFlowBase",
        "import claw_r1.data_pool.data_model, claw_r1.agent_flow; found = claw_r1.agent_flow.AgentFlowBase",
    ],
)
def test_provided_modules_are_found_by_every_form_of_import(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ours.MODULES:
        monkeypatch.setitem(sys.modules, name, ours)  # so that they are gone afterwards
    provide_modules()
    names: dict[str, Any] = {}
    exec(line, names)
    assert names["found"] is AgentFlowBase


def test_modules_are_not_provided_over_those_that_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "claw_r1", pytest)
    with pytest.raises(BadRequest, match="loaded already"):
        provide_modules()
