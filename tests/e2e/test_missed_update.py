"""T7: the real vLLM, in float32 and in bfloat16: every update is proven, and one that it missed is caught."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from stepwell.engines.engine import EngineControl, changing_from
from stepwell.errors import SyncFailed
from stepwell.trainers.transfers import CheckpointTransfer
from stepwell.trainers.weight_sync import WeightSync, probe_logprobs
from tests.rig.calls import get
from tests.rig.vllm_server import start_vllm

PROBE = list(b"What the weights make of this\n")
RATE = 1e-5
"""Of Adam: an update as small as that of a large model."""


class ForgetfulTransfer(CheckpointTransfer):
    """Writes every update, and tells the engine of it unless it forgets to."""

    forgets = False

    def update(self, engines: Sequence[EngineControl]) -> None:
        if not self.forgets:
            super().update(engines)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """One update; returns how far it moved the log-probabilities of the probe."""
    before = probe_logprobs(model, PROBE)
    ids = torch.tensor([PROBE])
    optimizer.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    return max(abs(new - old) for new, old in zip(probe_logprobs(model, PROBE), before, strict=True))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.nightly)])
async def test_one_missed_update_is_caught(
    dtype: str, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    transfer = ForgetfulTransfer(tmp_path / "w", max_file_bytes=2**18)
    with start_vllm(tiny_model, log=tmp_path / "vllm.log", dtype=dtype) as vllm:
        sync = WeightSync([vllm.url], transfer=transfer, probe=PROBE)
        for version in (1, 2, 3):
            moved = train(model, optimizer)
            report = sync.sync(model, version)
            assert report.proven_tensors is not None
            assert report.proven_tensors >= 12, "each layer's projections and norms, the embedding and the last norm"
            with capsys.disabled():
                sys.stdout.write(f"\n{dtype}: moved {moved:.1e}, {report}\n")
        transfer.forgets = True
        train(model, optimizer)
        with pytest.raises(
            SyncFailed, match=rf"does not hold the weights that were sent: .* another checksum in {dtype}"
        ):
            sync.sync(model, 4)
        assert (await get(f"{vllm.url}/weight_info")).json() == {"weight_version": changing_from("3")}
        transfer.forgets = False
        assert sync.sync(model, 4).proven_tensors == report.proven_tensors
