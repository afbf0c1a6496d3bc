"""White-box flows that are written for Claw-R1's AgentFlowBase.

    from stepwell.agents.claw_r1 import AgentFlowBase, Step, register  # in the flow's file, in place of claw_r1's

    flow = ClawR1Flow("http://127.0.0.1:8100", MyFlow, tokenizer=tokenizer, n_rollouts=8)
    await AsyncRollouter(flow, Dataset("train.jsonl"), gateway=flow.gateway.url).run()

After `provide_modules()` a flow's file needs no change: the modules have Claw-R1's names.

- A rollout's steps are in the trajectory that was opened for it, whatever uids they carry; its end completes it.
- A submitted step gets the temperature, the versions and the model of the generation that it consists of.
- What `run` returns is a number of steps, and no reward.
"""

import asyncio
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlencode

import numpy as np
from pydantic import BaseModel

from stepwell.agents.gateway_client import SAMPLING, GatewayClient
from stepwell.agents.rollout import AgentFlow, Rollout, made, portable
from stepwell.agents.whitebox import DUPLICATE
from stepwell.errors import BadRequest, Conflict
from stepwell.wire import gateway_api as shapes

S = TypeVar("S", bound=BaseModel)
F = TypeVar("F", bound="type[AgentFlowBase]")
MODULES = (
    *("claw_r1", "claw_r1.agent_flow", "claw_r1.agent_flow.agent_flow"),
    *("claw_r1.data_pool", "claw_r1.data_pool.data_model"),
)
REGISTERED: dict[str, type["AgentFlowBase"]] = {}
"""The flows by the names that samples give as `agent_name`."""


@dataclass
class Step:
    """One generation, as a flow submits it."""

    prompt_ids: list[int]
    response_ids: list[int]
    reward: float | None = None
    multi_modal_data: dict[str, Any] | None = None
    rollout_log_probs: list[float] | None = None
    routed_experts: Any = None
    trajectory_uid: str = ""
    prompt_uid: str = ""
    step_index: int = 0
    policy_version: int = 0
    """The policy version that the step names; the engine's report of the generation takes precedence."""
    is_last: bool = False
    metadata: dict[str, Any] | None = None


class FlowConfig(dict[str, Any]):
    """A configuration whose keys are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"the configuration has no {name!r}; give it as ClawR1Flow(config={{…}})")
        return FlowConfig(self[name]) if isinstance(self[name], dict) else self[name]


def register(agent_name: str) -> Callable[[F], F]:
    """A decorator: samples with this `agent_name` are given to the class."""

    def decorate(flow: F) -> F:
        REGISTERED[agent_name] = flow
        return flow

    return decorate


class AgentFlowBase(ABC):
    """Subclasses write `run`. ClawR1Flow makes one for each rollout; one that is made otherwise submits steps under the
    uids that they carry."""

    def __init__(
        self,
        trainer_config: Any = None,
        gateway_url: str = "",
        tokenizer: Any = None,
        processor: Any = None,
        dataset_cls: Any = None,
        dataset_config: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        self.config = getattr(trainer_config, "config", trainer_config)
        self.gateway_url = gateway_url.rstrip("/")
        self.tokenizer = tokenizer
        self.processor = processor
        self.dataset_cls = dataset_cls
        self.dataset_config = dataset_config or {}
        self.apply_chat_template_kwargs: Mapping[str, Any] = self.dataset_config.get("apply_chat_template_kwargs", {})
        self._owner: ClawR1Flow | None = None
        self._rollout: Rollout | None = None
        self._generations: list[tuple[list[int], shapes.GenerationDone]] = []
        """Each with its prompt."""
        self._tokens_of: dict[int, tuple[list[int], list[int]]] = {}
        """The prompt and the response of each step that was submitted, by its index."""

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> int:
        """One rollout. `kwargs` are the sample's fields, `uid` and `channel`. Returns the number of steps."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    @property
    def system_prompt(self) -> list[int]:
        """The ids that a chat template puts before the first message."""
        once, twice = (self._render([{"role": "user", "content": ""}] * count, None, end=False) for count in (1, 2))
        return once[: 2 * len(once) - len(twice)]

    async def process_vision_info(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """BadRequest for images: an engine gets token ids only."""
        parts = (part for message in messages if isinstance(message["content"], list) for part in message["content"])
        if any(part.get("type") != "text" for part in parts):
            raise BadRequest("a white-box flow sends token ids, so its messages cannot have images or videos")
        return {}

    async def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        images: object = None,
        videos: object = None,
        remove_system_prompt: bool = False,
    ) -> list[int]:
        """The ids of a prompt."""
        if images or videos:
            raise BadRequest("a white-box flow sends token ids, so its prompts cannot have images or videos")
        ids = await asyncio.to_thread(self._render, messages, tools)
        return ids[len(self.system_prompt) :] if remove_system_prompt else ids

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, *, end: bool = True
    ) -> list[int]:
        how = {"tools": tools, "add_generation_prompt": end, "tokenize": True, "return_dict": False}
        return list(self.tokenizer.apply_chat_template(list(messages), **how, **self.apply_chat_template_kwargs))

    async def gateway_generate(self, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any]) -> dict[str, Any]:
        """`token_ids`, `log_probs` and `stop_reason`, and what else the gateway tells of them."""
        wanted = made(shapes.Generate, prompt_ids=list(prompt_ids), sampling_params=dict(sampling_params))
        done = await self._ask("/generate", shapes.GenerationDone, wanted)
        self._generations.append((wanted.prompt_ids, done))
        return done.model_dump(mode="json")

    async def gateway_compute_reward(
        self,
        prompt_ids: Sequence[int],
        response_ids: Sequence[int],
        num_turns: int = 2,
        extra_fields: Mapping[str, Any] | None = None,
        dataset_fields: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """`reward_score` and `reward_extra_info`, of the gateway's reward worker."""
        wanted = made(
            shapes.ComputeReward,
            prompt_ids=list(prompt_ids),
            response_ids=list(response_ids),
            num_turns=num_turns,
            extra_fields=portable(extra_fields or {}),
            dataset_fields=portable(dataset_fields or {}),
        )
        return (await self._ask("/compute_reward", shapes.RewardComputed, wanted)).model_dump(mode="json")

    async def gateway_submit_steps(self, steps: Sequence[Step], channel: str | None = None) -> int:
        """The number of steps that were new to the pool. Conflict says why others were refused."""
        query = {} if channel is None else {"channel": channel}
        if self._owner is not None:
            if channel not in (None, self._owner.channel):
                raise BadRequest(f"the rollout is in the channel {self._owner.channel!r}, and not in {channel!r}")
            if len({step.trajectory_uid for step in steps}) > 1:
                raise BadRequest("a flow makes one trajectory in each run; these steps name several")
            self._check_indexes(steps)
            query = {"channel": self._owner.channel, "group_size": str(self._owner.group_size)}
        submitted = shapes.SubmitSteps(steps=[self._submitted(step) for step in steps])
        told = await self._ask(f"/submit_steps?{urlencode(query)}", shapes.StepsSubmitted, submitted)
        if refused := ", ".join(f"{count} {cause}" for cause, count in told.refused.items() if cause != DUPLICATE):
            raise Conflict(f"the pool refused steps: {refused}")
        return told.accepted

    def _check_indexes(self, steps: Sequence[Step]) -> None:
        """A retry submits the same step again. Of others with its index, the pool would keep none."""
        for step in steps:
            tokens = list(step.prompt_ids), list(step.response_ids)
            if self._tokens_of.setdefault(step.step_index, tokens) != tokens:
                raise BadRequest(
                    f"two steps of this run have the step_index {step.step_index}, and the pool keeps one of each: "
                    "count them, step_index=0, 1, 2 …"
                )

    def _submitted(self, step: Step) -> shapes.SubmittedStep:
        fields = {
            "prompt_ids": list(step.prompt_ids),
            "response_ids": list(step.response_ids),
            "response_logprobs": step.rollout_log_probs,
            "reward": step.reward,
            "step_index": step.step_index,
            "policy_version": step.policy_version,
            "metadata": portable(step.metadata or {}),
            "multi_modal_data": portable(step.multi_modal_data or {}),
            **self._told_of(step),
        }
        if self._rollout is None:
            names = {"trajectory_uid": step.trajectory_uid, "prompt_uid": step.prompt_uid, "is_last": step.is_last}
        else:  # the end of the rollout completes it, so that its reward is not late
            names = {"trajectory_uid": self._rollout.trajectory_uid, "prompt_uid": self._rollout.prompt_uid}
        return made(shapes.SubmittedStep, **fields, **names)

    def _told_of(self, step: Step) -> dict[str, Any]:
        """The gateway's report of the generation that a step consists of, or whose tokens it begins with. Steps may go
        to another gateway than the one that remembers it."""
        length, tokens = len(step.response_ids), (list(step.prompt_ids), list(step.response_ids))
        same = [done for prompt, done in reversed(self._generations) if (prompt, done.token_ids[:length]) == tokens]
        if not same:
            return {}
        done = next((done for done in same if _are_equal(done.log_probs[:length], step.rollout_log_probs)), same[0])
        spans = [(span.version, span.start, min(span.end, length)) for span in done.version_spans]
        return {
            "policy_version": done.policy_version,
            "version_spans": [span for span in spans if span[1] < span[2]],
            "temperature": done.temperature,
            "sampling": done.sampling,
            "model": done.model,
            "finish_reason": done.stop_reason if length == len(done.token_ids) else "length",
        }

    async def _ask(self, path: str, shape: type[S], wanted: BaseModel) -> S:
        if self._rollout is not None:
            return await self._rollout.gateway.ask("POST", path, shape, wanted, SAMPLING)
        async with GatewayClient(self.gateway_url) as gateway:
            return await gateway.ask("POST", path, shape, wanted, SAMPLING)


class ClawR1Flow(AgentFlow):
    """Runs a flow of Claw-R1 as one of Stepwell's: for AsyncRollouter and Validation."""

    def __init__(
        self,
        gateway: str,
        flow: type[AgentFlowBase],
        *,
        tokenizer: Any,
        n_rollouts: int = 8,
        sampling_params: Mapping[str, Any] | None = None,
        config: Any = None,
        **more: Any,
    ) -> None:
        """`flow` makes the rollouts of samples without an `agent_name`. `config` is what the flow reads as its
        self.config, for example {"actor_rollout_ref": {"rollout": {"prompt_length": 512}}}. `more` are the arguments
        of every AgentFlow, such as `key` and `channel`."""
        super().__init__(gateway, group_size=n_rollouts, **more)
        self._flow = flow
        self._tokenizer = tokenizer
        self._sampling = dict(sampling_params or {})
        self._config = FlowConfig(config or {}) if config is None or isinstance(config, dict) else config

    async def run(self, rollout: Rollout) -> None:
        fields = {**rollout.sample, "uid": rollout.prompt_uid, "channel": self.channel}
        if "prompt" in fields:
            fields.setdefault("raw_prompt", fields["prompt"])  # as verl's dataset names its column
        flow = self._flow_of(fields.get("agent_name"))(
            trainer_config=self._config,
            gateway_url=self.gateway.url,
            tokenizer=self._tokenizer,
            dataset_config=getattr(self._config, "data", {}),
        )
        flow._owner, flow._rollout = self, rollout
        await flow.run(dict(self._sampling), **fields)

    def _flow_of(self, agent_name: str | None) -> type[AgentFlowBase]:
        if agent_name is None:
            return self._flow
        if agent_name not in REGISTERED:
            known = ", ".join(sorted(REGISTERED)) or "none"
            raise BadRequest(f"no flow is registered as {agent_name!r}; there are {known}")
        return REGISTERED[agent_name]


def _are_equal(told: Sequence[float], submitted: Sequence[float] | None) -> bool:
    """Compares as 32-bit numbers: a flow may have kept them in an array."""
    return submitted is not None and np.array_equal(np.array(told, np.float32), np.array(submitted, np.float32))


def provide_modules() -> None:
    """Afterwards this module has the names of Claw-R1's that a flow imports. BadRequest if Claw-R1's are loaded."""
    this = sys.modules[__name__]
    if sys.modules.get(MODULES[0], this) is not this:
        raise BadRequest("Claw-R1's own modules are loaded already; call provide_modules() before any import of them")
    sys.modules.update(dict.fromkeys(MODULES, this))
    for name in MODULES[1:]:
        setattr(this, name.rpartition(".")[2], this)  # `from claw_r1.agent_flow import agent_flow`
