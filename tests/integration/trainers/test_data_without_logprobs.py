"""Steps and groups that tell neither log-probabilities nor temperatures, as agents and environments post them over
HTTP, are trained by every trainer with its default settings; its metrics say what was filled in.

TRL's own loss and verl's own trainer run with such data in `python -m benchmarks.truth` and in
tests/e2e/test_training_in_verl.py.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from rig.atropos.server import TRAINER, serve_atropos
from rig.fake_engine import FakeEngine
from rig.gateways import serve_gateway
from stepwell.trainers import trl_callback as trl_old_logprobs
from stepwell.trainers.loader import pool_loader
from stepwell.trainers.settings import Settings
from stepwell.trainers.trainer import AsyncTrainer
from stepwell.trainers.trl import StepwellRolloutWorker
from stepwell.trainers.verl.mode_settings import PoolModeSettings
from stepwell.trainers.verl.pool_feed import PoolFeed
from tests.unit.trainers.models import Recurrent
from tests.unit.trainers.scripted_engine import serve
from tests.unit.trainers.test_trainer import SyncLog, same, weights
from tests.unit.trainers.tinker.adapter_engine import AdapterEngine
from tests.unit.trainers.tinker.fake_tinker import FakeTinker, install, serve_archives
from tests.unit.trainers.tinker.test_tinker_loop import Tenant
from tests.unit.trainers.training_pool import TrainingPool

TOKENS = 4
"""Trained ones of each group."""


def steps() -> list[dict[str, Any]]:
    """Nine fields each, as plain lists: an agent that makes its steps by itself."""
    return [
        {
            "prompt_ids": [1, 2],
            "response_ids": [3 + n, 5],
            "reward": float(n),
            "trajectory_uid": f"t{n}",
            "prompt_uid": "p",
            "step_index": 0,
            "policy_version": 0,
            "is_last": True,
            "metadata": {"data_source": "sums"},
        }
        for n in range(2)
    ]


def group() -> dict[str, Any]:
    """As an environment sends it that tokenizes its conversations when they have ended."""
    tokens = [[1, 2, 6 + n, 5] for n in range(2)]
    return {"tokens": tokens, "masks": [[-100, -100, *row[2:]] for row in tokens], "scores": [1.0, -1.0]}


async def submit_steps(pool: TrainingPool, channel: str) -> None:
    async with FakeEngine() as engine, serve_gateway(pool.local, [engine.url]) as url, httpx.AsyncClient() as client:
        sent = {"steps": steps()}
        answer = await client.post(f"{url}/submit_steps", params={"channel": channel, "group_size": 2}, json=sent)
        assert answer.json() == {"accepted": 2, "refused": {}}


async def send_group(pool: TrainingPool, channel: str) -> None:
    prefix = "" if channel == "train" else f"/channel/{channel}"
    async with serve_atropos(pool.local) as url, httpx.AsyncClient(base_url=url + prefix) as client:
        assert (await client.post("/register", json=TRAINER)).status_code == 200
        assert (await client.post("/scored_data", json=group())).json()["status"] == "received"


@pytest.fixture
def pool() -> TrainingPool:
    pool = TrainingPool()
    pool._run(submit_steps(pool, "train"))
    pool._run(send_group(pool, "train"))
    return pool


def test_the_reference_trainer(pool: TrainingPool) -> None:
    model = Recurrent()
    trainer = AsyncTrainer(pool, model, settings=Settings(groups=2, learning_rate=1e-2), sync=SyncLog(pool))
    metrics = trainer.step()
    assert not same(weights(model), weights(Recurrent()))
    assert (metrics.tokens, metrics.logprobs_recomputed, metrics.logprobs_current) == (2 * TOKENS, 2 * TOKENS, 0)
    assert metrics.temperatures_assumed == 4
    assert (metrics.rollouts_without_logprobs, metrics.steps_unknown_temperature) == (0, 0)


def test_a_loop_with_a_loader(pool: TrainingPool) -> None:
    model = Recurrent()
    (batch,) = pool_loader(pool, 2, batches=1)
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    logprobs = logits.log_softmax(-1).gather(2, batch["input_ids"][:, 1:, None])[..., 0]
    old = torch.where(batch["missing_logprobs"][:, 1:], logprobs.detach(), batch["logprobs"][:, 1:])
    gains = (logprobs - old).exp() * batch["advantages"][:, 1:]
    (-gains[batch["trained"][:, 1:]].mean()).backward()
    assert int(batch["missing_logprobs"].sum()) == int(batch["trained"].sum()) == 2 * TOKENS
    assert all(value.grad is not None and value.grad.isfinite().all() for value in model.parameters())
    assert any(value.grad is not None and value.grad.abs().sum() > 0 for value in model.parameters())


def test_the_worker_of_trl(pool: TrainingPool) -> None:
    worker = StepwellRolloutWorker(pool)
    worker.resume(None)
    worker.start()
    try:
        samples = [worker.rollout_buffer.get(timeout=10) for _ in range(4)]
        noted = [worker.metrics_queue.get(timeout=10) for _ in range(2)]
    finally:
        worker.stop()
    assert sum(int(sample.completion_mask.sum()) for sample in samples) == 2 * TOKENS
    assert all(np.isnan(sample.old_log_probs[sample.completion_mask == 1]).all() for sample in samples)
    assert [rates["logprobs_current"] for rates in noted] == [(TOKENS, TOKENS)] * 2
    assert [rates["temperatures_assumed"] for rates in noted] == [(2, 2)] * 2
    micro_batch = {
        "old_log_probs": torch.from_numpy(samples[0].old_log_probs[2:])[None],
        "token_index": torch.tensor([[0, 1]]),
    }
    known, places = trl_old_logprobs.known_logprobs(micro_batch)
    assert (known.tolist(), places.tolist()) == ([[0.0, 0.0]], [0, 1])


def test_the_feed_of_verl(pool: TrainingPool) -> None:
    taken = PoolFeed(pool, PoolModeSettings(weights="weights")).take_rows(2)
    assert len(taken.rows) == 4
    assert all(np.isnan(row.logprobs[row.mask == 1]).all() for row in taken.rows), "verl puts its own there"
    assert (taken.metrics["tokens"], taken.metrics["logprobs_current"]) == (2 * TOKENS, 2 * TOKENS)
    assert taken.metrics["temperatures_assumed"] == 4


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTinker]:
    install(monkeypatch)
    with serve_archives(FakeTinker()) as service:
        yield service


@pytest.mark.parametrize("send", [submit_steps, send_group])
def test_a_tinker_service(send: Callable[..., Any], service: FakeTinker, tmp_path: Path) -> None:
    pool = TrainingPool()
    pool._run(send(pool, "east"))
    with serve(AdapterEngine()) as engine:
        tenant = Tenant(pool, service, engine, tmp_path)
        update = tenant.trainer().step()
    (client,) = service.clients
    assert len(client.trained) == 2, "both rollouts are in the weights"
    assert client.asked[0] == ("forward", "importance_sampling", None)
    assert (update.tokens, update.filled_in.logprobs_current, update.filled_in.temperatures_assumed) == (4, 4, 2)
    sent: Sequence[SimpleNamespace] = client.sent
    assert [datum.loss_fn_inputs["logprobs"].tolist() for datum in sent] == [[0.0, -1.0, -1.0]] * 2
