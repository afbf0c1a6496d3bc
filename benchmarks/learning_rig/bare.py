"""The loop without pool and gateway: agents call vLLM, and a queue in the same process feeds the trainer.

It is what one would write for one machine: no record, no lease, no restart, no second process. Agents, learner and
weight sync are the same as with Stepwell.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from openai import AsyncOpenAI, DefaultAioHttpClient

from stepwell.agents.dataset import Dataset, Prompt
from stepwell.demo.agent_process import CALL_TIMEOUT, GROUP
from stepwell.demo.tasks import Task
from stepwell.pool.client.batch import make_batch
from stepwell.steps.columns import pack
from stepwell.steps.step import Step, ids_array, logprobs_array
from stepwell.trainers.learner import Learner
from stepwell.trainers.rows import choose_rows
from stepwell.trainers.settings import Settings
from stepwell.trainers.weight_sync import WeightSync

if TYPE_CHECKING:
    import torch

CONCURRENCY = 64


@dataclass(slots=True)
class Recording:
    """An OpenAI client, as far as the tasks use one, which keeps what a trainer needs of each reply."""

    sdk: AsyncOpenAI
    replies: list[Any] = field(default_factory=list)

    @property
    def chat(self) -> "Recording":
        return self

    @property
    def completions(self) -> "Recording":
        return self

    async def create(self, **asked: Any) -> Any:
        wanted: dict[str, Any] = {"extra_body": {"return_token_ids": True}, "logprobs": True}
        reply = await self.sdk.chat.completions.create(**asked, **wanted)
        self.replies.append(reply)
        return reply


class BareLoop:
    def __init__(
        self,
        engine: str,
        task: Task,
        dataset: Dataset,
        model: "torch.nn.Module",
        sync: WeightSync,
        settings: Settings,
        ahead: int,
    ) -> None:
        """`ahead`: groups that may be untrained. A batch's worth and each batch is sampled after the update before it;
        two, and sampling goes on while the model is trained."""
        http = DefaultAioHttpClient()
        self._sdk = AsyncOpenAI(base_url=f"{engine}/v1", api_key="-", timeout=CALL_TIMEOUT, http_client=http)
        self._task = task
        self._prompts = iter(dataset)
        self._model = model
        self._learner = Learner(model, None, settings)
        self._sync = sync
        self._settings = settings
        self._ahead = ahead
        self._versions = count(1)

    async def run(self, updates: int) -> float:
        """Train; gives rollouts a second."""
        ready: asyncio.Queue[list[Step]] = asyncio.Queue()
        ahead, slots = asyncio.Semaphore(self._ahead), asyncio.Semaphore(CONCURRENCY)
        began = time.monotonic()
        async with self._sdk, asyncio.TaskGroup() as tasks:
            sampling = tasks.create_task(self._sample(ready, ahead, slots))
            for update in range(updates):
                steps = [await ready.get() for _ in range(self._settings.groups)]
                await asyncio.to_thread(self._learn, steps, update)
                for _ in steps:
                    ahead.release()
            seconds = time.monotonic() - began
            sampling.cancel()
        return updates * self._settings.groups * GROUP / seconds

    async def _sample(
        self, ready: asyncio.Queue[list[Step]], ahead: asyncio.Semaphore, slots: asyncio.Semaphore
    ) -> None:
        async with asyncio.TaskGroup() as tasks:
            for prompt in self._prompts:
                await ahead.acquire()
                tasks.create_task(self._group(prompt, ready, slots))

    async def _group(self, prompt: Prompt, ready: asyncio.Queue[list[Step]], slots: asyncio.Semaphore) -> None:
        rollouts = await asyncio.gather(*(self._rollout(prompt, i, slots) for i in range(GROUP)))
        ready.put_nowait([step for steps in rollouts for step in steps])

    async def _rollout(self, prompt: Prompt, index: int, slots: asyncio.Semaphore) -> list[Step]:
        client: Any = Recording(self._sdk)
        async with slots:
            reward = await self._task.play(client, prompt.sample)
        last = len(client.replies) - 1
        return [
            _step(reply, f"{prompt.uid}:{index}", prompt.uid, turn, reward if turn == last else None)
            for turn, reply in enumerate(client.replies)
        ]

    def _learn(self, groups: Sequence[list[Step]], update: int) -> None:
        batch = make_batch(pack([step for steps in groups for step in steps]), [len(steps) for steps in groups])
        self._learner.learn(choose_rows(batch, ()), update)
        self._sync.sync(self._model, next(self._versions))


def _step(reply: Any, trajectory_uid: str, prompt_uid: str, index: int, reward: float | None) -> Step:
    choice = reply.choices[0]
    return Step(
        prompt_ids=ids_array(reply.prompt_token_ids),
        response_ids=ids_array(choice.token_ids),
        response_logprobs=logprobs_array([token.logprob for token in choice.logprobs.content]),
        trajectory_uid=trajectory_uid,
        prompt_uid=prompt_uid,
        step_index=index,
        reward=reward,
        temperature=1.0,
    )
