"""Two tenants with opposite tasks on one base model: one wants the answer to begin with the last letter of the word,
the other one with its first."""

import asyncio
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, permutations
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import torch
from openai import AsyncOpenAI
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from stepwell.agents.blackbox import BlackBoxAgentFlow
from stepwell.agents.dataset import Dataset
from stepwell.agents.rollout import Rollout
from stepwell.agents.rollouter import AsyncRollouter
from stepwell.demo.model import CONTEXT, END_OF_TEXT, END_OF_TURN, PADDED_SIZE, ScriptTurn, warm_up, write_model
from stepwell.demo.tasks import LETTERS
from stepwell.trainers.weight_sync import probe_logprobs

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


@dataclass(frozen=True, slots=True)
class Answer:
    word: str
    text: str
    prompt_ids: list[int]
    ids: list[int]
    logprobs: list[float]


async def held_out_answers(engine: str, models: Sequence[str]) -> dict[str, list[Answer]]:
    """What the engine's own weights or adapters answer to words that were never trained. All are asked at once, so that
    one batch has tokens of several adapters."""

    async def ask(client: httpx.AsyncClient, model: str, word: str) -> list[Answer]:
        asked = {"model": model, "messages": [{"role": "user", "content": word}], "max_tokens": 5, "temperature": 1.0}
        more = {"n": 4, "logprobs": True, "return_token_ids": True}
        reply = await client.post(f"{engine}/v1/chat/completions", json={**asked, **more})
        reply.raise_for_status()
        told = reply.json()
        return [
            Answer(
                word,
                choice["message"]["content"] or "",
                told["prompt_token_ids"],
                choice["token_ids"],
                [token["logprob"] for token in choice["logprobs"]["content"]],
            )
            for choice in told["choices"]
        ]

    async with httpx.AsyncClient(timeout=300) as client:
        calls = [ask(client, model, word) for word in WORDS[:HELD_OUT] for model in models]
        answers = await asyncio.gather(*calls)
    return {model: list(chain(*answers[place :: len(models)])) for place, model in enumerate(models)}


def reward(answers: Sequence[Answer], channel: str) -> float:
    """The mean by a tenant's measure."""
    return fmean(answer.text.startswith(WANTED[channel](answer.word)) for answer in answers)


def logprob_gap(answers: Sequence[Answer], model: Path, adapter: Path) -> float:
    """How far the engine's log-probabilities are from those of the model with the adapter, computed here."""
    merged = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = json.loads((adapter / "adapter_config.json").read_text())
    weights, scaling = load_file(adapter / "adapter_model.safetensors"), config["lora_alpha"] / config["r"]
    for name in weights:
        if name.endswith(".lora_A.weight"):
            module = merged.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
            module.weight.data += scaling * (weights[name.replace("lora_A", "lora_B")] @ weights[name])
    gaps = []
    for answer in answers:
        own = probe_logprobs(merged, [*answer.prompt_ids, *answer.ids])[len(answer.prompt_ids) - 1 :]
        gaps += [abs(told - computed) for told, computed in zip(answer.logprobs, own, strict=True)]
    return max(gaps)
