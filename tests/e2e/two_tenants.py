"""Two tenants with opposite tasks on one base model: one wants the answer to begin with the last letter of the word,
the other one with its first."""

import asyncio
import random
from collections.abc import Callable, Mapping
from itertools import permutations
from pathlib import Path
from typing import Any

import httpx
import torch
from openai import AsyncOpenAI
from transformers import Qwen3Config, Qwen3ForCausalLM

from stepwell.agents.blackbox import BlackBoxAgentFlow
from stepwell.agents.dataset import Dataset
from stepwell.agents.rollout import Rollout
from stepwell.agents.rollouter import AsyncRollouter
from stepwell.demo.model import warm_up, write_model
from stepwell.demo.tasks import LETTERS
from stepwell.demo.vocabulary import CONTEXT, END_OF_TEXT, END_OF_TURN, PADDED_SIZE, ScriptTurn

GROUP = 8
"""Rollouts per prompt."""
HELD_OUT = 48
WARM_UP_STEPS = 150
WORDS = ["".join(letters) for letters in permutations(LETTERS, 3)]
WANTED: Mapping[str, Callable[[str], str]] = {"east": lambda word: word[-1], "west": lambda word: word[0]}
"""The first letter of a right answer, by tenant. At the beginning, one answer of three is right."""

random.Random(0).shuffle(WORDS)


def new_model(layers: int = 2) -> Any:
    """A Qwen3, which SkyRL's JAX backend knows."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=PADDED_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
        eos_token_id=END_OF_TURN,
        pad_token_id=END_OF_TEXT,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call]


def make_base_model(folder: Path) -> Path:
    """Warmed up to write the word's letters in any order."""
    model, rng = new_model(), random.Random(0)

    def conversations() -> Any:
        while True:
            word = rng.choice(WORDS[HELD_OUT:])
            yield ScriptTurn("user", word), ScriptTurn("assistant", "".join(rng.sample(word, len(word))))

    warm_up(model, conversations(), steps=WARM_UP_STEPS)
    return write_model(model, folder)


class Tenants:
    """The agents of all tenants, which make rollouts until the block ends."""

    def __init__(self, gateway: str) -> None:
        self._gateway = gateway
        self._client = AsyncOpenAI(base_url=gateway, api_key="of the rollout", max_retries=5)
        self._running: list[asyncio.Task[object]] = []

    async def __aenter__(self) -> "Tenants":
        for channel in WANTED:
            agent = _agent(channel, self._client)
            flow = BlackBoxAgentFlow(self._gateway, agent, channel=channel, group_size=GROUP)
            words = Dataset([{"word": word} for word in WORDS[HELD_OUT:]], seed=0)
            rollouter = AsyncRollouter(flow, words, gateway=self._gateway, concurrency=16)
            self._running.append(asyncio.create_task(rollouter.run()))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._client.close()

    def check(self) -> None:
        """Raises what has ended them."""
        for task in self._running:
            if task.done():
                task.result()


def _agent(channel: str, client: AsyncOpenAI) -> Callable[[Rollout], Any]:
    async def agent(rollout: Rollout) -> float:
        word, own = str(rollout.sample["word"]), client.with_options(base_url=rollout.base_url, api_key=rollout.api_key)
        reply = await own.chat.completions.create(
            model="default", messages=[{"role": "user", "content": word}], temperature=1.0, max_tokens=5
        )
        return float((reply.choices[0].message.content or "").startswith(WANTED[channel](word)))

    return agent


async def held_out_reward(engine: str, model: str, channel: str) -> float:
    """Of an adapter that the engine serves, by a tenant's measure, on words that were never trained."""

    async def ask(client: httpx.AsyncClient, word: str) -> float:
        asked = {"model": model, "messages": [{"role": "user", "content": word}], "max_tokens": 5, "temperature": 1.0}
        reply = await client.post(f"{engine}/v1/chat/completions", json={**asked, "n": 4})
        reply.raise_for_status()
        texts = [choice["message"]["content"] or "" for choice in reply.json()["choices"]]
        return float(sum(text.startswith(WANTED[channel](word)) for text in texts) / len(texts))

    async with httpx.AsyncClient(timeout=120) as client:
        rewards = [await ask(client, word) for word in WORDS[:HELD_OUT]]
    return sum(rewards) / len(rewards)
