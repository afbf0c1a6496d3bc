"""T7: the real vLLM, in float32 and in bfloat16: every update is proven, and one that it missed is caught."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rig.calls import get
from rig.vllm_server import VllmServer, start_vllm
from stepwell.engines.engine import EngineControl, changing_from
from stepwell.errors import SyncFailed
from stepwell.trainers.transfers import CheckpointTransfer
from stepwell.trainers.weight_sync import WeightSync

PROBE = list(b"What the weights make of this\n")
RATE = 1e-5
"""Of Adam: an update as small as that of a large model."""


class ForgetfulTransfer(CheckpointTransfer):
    """Writes every update, and tells the engine of it unless it forgets to."""

    forgets = False

    def update(self, engines: Sequence[EngineControl]) -> None:
        if not self.forgets:
            super().update(engines)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One update."""
    ids = torch.tensor([PROBE])
    optimizer.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()


@pytest.mark.usefixtures("weights")
async def test_one_missed_update_is_caught(vllm: VllmServer, plain_models: tuple[Path, Path], tmp_path: Path) -> None:
    await check_updates(vllm, plain_models[0], "float32", first_version=2, folder=tmp_path)


@pytest.mark.nightly
async def test_one_missed_update_is_caught_in_bfloat16(tiny_model: Path, tmp_path: Path) -> None:
    with start_vllm(tiny_model, log=tmp_path / "vllm.log", dtype="bfloat16") as vllm:
        await check_updates(vllm, tiny_model, "bfloat16", first_version=1, folder=tmp_path)


async def check_updates(vllm: VllmServer, served: Path, dtype: str, *, first_version: int, folder: Path) -> None:
    """Three updates arrive, the fourth does not."""
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(served, dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    transfer = ForgetfulTransfer(folder / "w", max_file_bytes=2**18)
    sync = WeightSync([vllm.url], transfer=transfer, probe=PROBE)
    for version in range(first_version, missed := first_version + 3):
        train(model, optimizer)
        report = sync.sync(model, version)
        assert report.proven_tensors is not None
        assert report.proven_tensors >= 12, "each layer's projections and norms, the embedding and the last norm"
    transfer.forgets = True
    train(model, optimizer)
    with pytest.raises(SyncFailed, match=rf"does not hold the weights that were sent: .* another checksum in {dtype}"):
        sync.sync(model, missed)
    assert (await get(f"{vllm.url}/weight_info")).json() == {"weight_version": changing_from(str(missed - 1))}
    transfer.forgets = False
    assert sync.sync(model, missed).proven_tensors == report.proven_tensors
