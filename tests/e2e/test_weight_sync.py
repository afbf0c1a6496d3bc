"""WeightSync into the real engine: it computes with the trainer's weights, or one is told; agents see nothing of it."""

import asyncio
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from rig.calls import get
from rig.gateways import GatewayProcess
from rig.vllm_server import VllmServer
from stepwell.engines.engine import EngineControl
from stepwell.errors import SyncFailed
from stepwell.gateway.recording.step_book import BRACKET
from stepwell.pool.client import DataPool
from stepwell.steps.step import Step, VersionSpan
from stepwell.trainers.transfers import CheckpointTransfer, WeightStream
from stepwell.trainers.weight_sync import WeightSync, probe_logprobs
from tests.e2e.episodes import open_episode
from tests.e2e.weights import Weights as EngineWeights
from tests.e2e.weights import metric, until

UPDATES = 50
AGENTS = 3
TOKENS = 80
"""Of an answer, so that most answers meet several updates."""
BETWEEN = 24
"""Tokens that the engine writes from one update to the next."""
ALIKE = 1e-3
ASKED: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Tell me a story."}],
    "max_tokens": TOKENS,
}
PROBE = list(b"What the weights make of this\n")


@pytest.fixture
def model(weights: EngineWeights, plain_models: tuple[Path, Path]) -> torch.nn.Module:
    """The trainer's copy of what the engine has, as version 1."""
    loaded: torch.nn.Module = AutoModelForCausalLM.from_pretrained(plain_models[0], dtype=torch.float32)
    return loaded


@pytest.fixture
def versions(pool: DataPool) -> Iterator[DataPool]:
    """The pool, whose version is as it was afterwards."""
    before = pool.stats().policy_version
    yield pool
    pool.set_policy_version(before, check=False)


def learn(model: torch.nn.Module, seed: int) -> None:
    """Move every weight a little, but for those that keep the model's text plain."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            change = 0.01 * torch.randn(parameter.shape, generator=random)
            if "embed_tokens" in name:
                change[:, 0] = 0.0
            if "o_proj" in name or "down_proj" in name:
                change[0] = 0.0
            parameter.add_(change)


async def test_the_engine_computes_with_the_trainers_weights(
    vllm: VllmServer, weights: EngineWeights, model: torch.nn.Module, versions: DataPool, tmp_path: Path
) -> None:
    sync = WeightSync([vllm.url], transfer=CheckpointTransfer(tmp_path / "w"), pool=versions, probe=PROBE)
    for version in (2, 3):
        before = probe_logprobs(model, PROBE)
        learn(model, version)
        report = await asyncio.to_thread(sync.sync, model, version)
        assert report.logprob_gap is not None
        assert report.logprob_gap <= ALIKE
        assert (await get(f"{vllm.url}/weight_info")).json() == {"weight_version": str(version)}
        told = await weights.logprobs(PROBE[:1], PROBE[1:])
        np.testing.assert_allclose(told, probe_logprobs(model, PROBE), atol=ALIKE)
        assert np.abs(told - before).max() > 10 * ALIKE, "the update is too small to tell"
        assert versions.stats().policy_version == version


class OtherWeights(CheckpointTransfer):
    """Leaves a layer as it was before training."""

    def __init__(self, folder: Path, old: dict[str, torch.Tensor]) -> None:
        super().__init__(folder)
        self._old = old

    def prepare(self, weights: WeightStream, engines: Sequence[EngineControl]) -> None:
        left = "model.layers.0.mlp.down_proj.weight"
        super().prepare([(name, self._old[left] if name == left else tensor) for name, tensor in weights], engines)


async def test_a_sync_that_leaves_a_layer_behind_is_caught_and_the_pool_not_told(
    vllm: VllmServer, model: torch.nn.Module, versions: DataPool, tmp_path: Path
) -> None:
    old = {name: value.clone() for name, value in model.state_dict().items()}
    before = versions.stats().policy_version
    learn(model, 2)
    sync = WeightSync([vllm.url], transfer=OtherWeights(tmp_path / "w", old), pool=versions, probe=PROBE)
    with pytest.raises(
        SyncFailed, match=r"1 of its \d+ tensors have another checksum .*layers.0.mlp.down_proj.weight\."
    ):
        await asyncio.to_thread(sync.sync, model, 9)
    assert (await get(f"{vllm.url}/is_paused")).json() == {"is_paused": True}
    assert (await get(f"{vllm.url}/weight_info")).json() == {"weight_version": "changing from 1"}
    assert versions.stats().policy_version == before


async def test_an_engine_that_cannot_read_the_weights_has_no_version(
    vllm: VllmServer, weights: EngineWeights, model: torch.nn.Module, tmp_path: Path
) -> None:
    class Unreadable(CheckpointTransfer):
        def prepare(self, weights: WeightStream, engines: Sequence[EngineControl]) -> None:
            super().prepare(weights, engines)
            (self._place / "model.safetensors").write_bytes(b"torn")

    sync = WeightSync([vllm.url], transfer=Unreadable(tmp_path / "w"), probe=PROBE)
    with pytest.raises(SyncFailed, match="/collective_rpc answered 500"):
        await asyncio.to_thread(sync.sync, model, 9)
    assert (await get(f"{vllm.url}/is_paused")).json() == {"is_paused": True}
    assert (await get(f"{vllm.url}/weight_info")).json() == {"weight_version": "changing from 1"}


@dataclass(frozen=True, slots=True)
class Written:
    """An answer, with what is told of the weights that wrote it."""

    prompt_ids: list[int]
    ids: list[int]
    logprobs: NDArray[np.float64]
    spans: tuple[VersionSpan, ...]
    bracket: tuple[int, int]


class Training:
    """Fifty updates of the engine's weights, each kept, so that it can be asked afterwards who wrote what."""

    def __init__(self, vllm: VllmServer, model: torch.nn.Module, sync: WeightSync) -> None:
        self._vllm = vllm
        self._model = model
        self._sync = sync
        self._kept = {1: self._copy()}
        self.is_over = False

    async def run(self) -> None:
        try:
            for version in range(2, 2 + UPDATES):
                learn(self._model, version)
                self._kept[version] = self._copy()
                await asyncio.to_thread(self._sync.sync, self._model, version)
                await self._engine_writes()
        finally:
            self.is_over = True

    async def _engine_writes(self) -> None:
        before = await metric(self._vllm, "vllm:generation_tokens_total")

        async def has_written() -> bool:
            return await metric(self._vllm, "vllm:generation_tokens_total") >= before + BETWEEN

        await until(has_written, "the agents' calls to go on")

    def gaps(self, written: Written, version: int) -> NDArray[np.float64]:
        """How far each token's recorded log-probability is from that under these weights."""
        self._model.load_state_dict(self._kept[version])
        expected = probe_logprobs(self._model, [*written.prompt_ids, *written.ids])[len(written.prompt_ids) - 1 :]
        found: NDArray[np.float64] = np.abs(written.logprobs - expected)
        return found

    def _copy(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self._model.state_dict().items()}


async def test_agents_see_nothing_of_fifty_updates_and_every_token_knows_its_weights(
    vllm: VllmServer, gateway: GatewayProcess, model: torch.nn.Module, versions: DataPool, tmp_path: Path
) -> None:
    sync = WeightSync([vllm.url], transfer=CheckpointTransfer(tmp_path / "w"), pool=versions, probe=PROBE)
    await asyncio.to_thread(sync.sync, model, 1)

    async def gateway_knows() -> bool:
        engines = (await get(f"{gateway.url}/engines")).json()["engines"]
        return [engine["weight_version"] for engine in engines] == ["1"]

    await until(gateway_knows, "the gateway to see the engine's version")
    training = Training(vllm, model, sync)
    live = [chatting(gateway, versions, training, stream=bool(agent % 2)) for agent in range(AGENTS)]
    chats, answers, _ = await asyncio.gather(gathered(live), generating(gateway, training), training.run())
    assert versions.stats().policy_version == 1 + UPDATES
    assert sum(len(answer.spans) > 1 for answer in answers) >= 5, "hardly an answer met an update"
    assert len(chats) >= 3 * AGENTS
    for written in [*chats, *answers]:
        assert len(written.ids) == TOKENS
        if written.spans:
            assert [span.start for span in written.spans] == [0, *(span.end for span in written.spans[:-1])]
            assert written.spans[-1].end == TOKENS
            for version, start, end in written.spans:
                assert training.gaps(written, version)[start:end].max() <= ALIKE
        else:
            first, last = written.bracket
            nearest = np.min([training.gaps(written, version) for version in range(first, last + 1)], axis=0)
            assert nearest.max() <= ALIKE


async def gathered(calls: Sequence[Awaitable[list[Written]]]) -> list[Written]:
    return [written for found in await asyncio.gather(*calls) for written in found]


async def chatting(gateway: GatewayProcess, pool: DataPool, training: Training, *, stream: bool) -> list[Written]:
    """An agent's calls, none of which may fail, until training is over."""
    async with open_episode(gateway.url, pool) as episode:
        while not training.is_over:
            heard, _ = await episode.ask(stream=stream, **ASKED)
            assert heard.finish_reason == "length"
        return [_of_step(step) for step in await episode.steps()]


async def generating(gateway: GatewayProcess, training: Training) -> list[Written]:
    """The same of an agent that sends tokens and gets tokens."""
    wanted = {"prompt_ids": PROBE, "sampling_params": {"max_tokens": TOKENS}}
    found: list[Written] = []
    async with httpx.AsyncClient(timeout=120) as http:
        while not training.is_over:
            reply = await http.post(f"{gateway.url}/generate", json=wanted)
            assert reply.status_code == 200, reply.text
            answer = reply.json()
            spans = tuple(VersionSpan(*span) for span in answer["version_spans"])
            assert spans
            assert answer["policy_version"] == spans[0].version
            found.append(Written(PROBE, answer["token_ids"], np.array(answer["log_probs"]), spans, (0, 0)))
    return found


def _of_step(step: Step) -> Written:
    assert step.response_logprobs is not None
    assert step.untrainable is None
    bracket: Any = step.extras.get(BRACKET, [step.policy_version, step.policy_version])
    assert step.policy_version == bracket[0]
    ids, logprobs = step.response_ids.tolist(), step.response_logprobs.astype(np.float64)
    return Written(step.prompt_ids.tolist(), ids, logprobs, step.version_spans, (bracket[0], bracket[1]))
