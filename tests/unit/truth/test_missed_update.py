"""T7: an engine that missed one update is caught in every dtype, and one in bfloat16 is not refused for its dtype."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from stepwell.engines.engine import changing_from
from stepwell.errors import SyncFailed
from stepwell.trainers.sync_round import EngineProof, SentDigests
from stepwell.trainers.transfers import CheckpointTransfer
from stepwell.trainers.weight_sync import WeightSync
from tests.unit.trainers.holding_engine import HoldingEngine
from tests.unit.trainers.models import Recurrent
from tests.unit.trainers.scripted_engine import serve

PROBE = [1, 2, 3, 4, 5, 6]
DTYPES = (torch.float32, torch.bfloat16)


def make_model() -> torch.nn.Module:
    """With logits so large that bfloat16 shows in the log-probabilities."""
    model = Recurrent(seed=0)
    with torch.no_grad():
        model.head.weight.mul_(32)
    return model


@pytest.fixture(params=DTYPES, ids=str)
def engine(request: pytest.FixtureRequest) -> Iterator[HoldingEngine]:
    with serve(HoldingEngine(make_model(), request.param)) as engine:
        yield engine


@pytest.fixture
def model() -> torch.nn.Module:
    """The trainer's, in float32."""
    return make_model()


def learn(model: torch.nn.Module, rate: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(rate * torch.randn_like(parameter))


def weight_sync(engine: HoldingEngine, folder: Path, **options: Any) -> WeightSync:
    return WeightSync([engine.url], transfer=CheckpointTransfer(folder), probe=PROBE, **options)


def test_updates_of_an_engine_in_any_dtype_are_proven(
    engine: HoldingEngine, model: torch.nn.Module, tmp_path: Path
) -> None:
    sync = weight_sync(engine, tmp_path / "w")
    for version in (1, 2, 3):
        learn(model, 1e-2)
        report = sync.sync(model, version)
        assert report.proven_tensors == len(model.state_dict())
        assert engine.weight_version == str(version)


@pytest.mark.parametrize("rate", [1e-1, 1e-3])
def test_one_missed_update_is_caught_by_checksums_before_the_engine_gets_the_version(
    engine: HoldingEngine, model: torch.nn.Module, tmp_path: Path, rate: float
) -> None:
    sync = weight_sync(engine, tmp_path / "w")
    sync.sync(model, 1)
    learn(model, rate)
    engine.misses_updates = True
    with pytest.raises(SyncFailed, match=rf"^{engine.url} does not hold the weights that were sent: \d+ of its 7 tens"):
        sync.sync(model, 2)
    assert engine.weight_version == changing_from("1"), "so no gateway calls it"


def test_the_first_update_cannot_be_missed_either(
    engine: HoldingEngine, model: torch.nn.Module, tmp_path: Path
) -> None:
    learn(model, 1e-3)
    engine.misses_updates = True
    with pytest.raises(SyncFailed, match="does not hold the weights that were sent"):
        weight_sync(engine, tmp_path / "w").sync(model, 1)


def test_a_tensor_that_is_left_behind_is_named(engine: HoldingEngine, model: torch.nn.Module, tmp_path: Path) -> None:
    sync = weight_sync(engine, tmp_path / "w")
    sync.sync(model, 1)
    learn(model, 1e-2)
    engine.keeps = frozenset(["head.bias"])
    with pytest.raises(SyncFailed, match=r"1 of its 7 tensors have another checksum in \w+, such as head.bias\. "):
        sync.sync(model, 2)


def test_an_engine_that_is_restarted_in_another_dtype_is_known_again_at_the_next_sync(
    model: torch.nn.Module, tmp_path: Path
) -> None:
    with serve(HoldingEngine(make_model(), torch.float32)) as engine:
        sync = weight_sync(engine, tmp_path / "w")
        sync.sync(model, 1)
        engine.dtype = torch.bfloat16
        with pytest.raises(SyncFailed, match="another checksum in float32"):
            sync.sync(model, 2)
        assert sync.sync(model, 3).proven_tensors == len(model.state_dict())


def test_without_checksums_the_probe_catches_a_missed_update_that_the_tolerance_would_allow(
    engine: HoldingEngine, model: torch.nn.Module, tmp_path: Path
) -> None:
    engine.has_checksums = False
    sync = weight_sync(engine, tmp_path / "w", tolerance=5.0)
    for version in (1, 2):
        assert sync.sync(model, version).proven_tensors is None
        learn(model, 5e-2)
    engine.misses_updates = True
    with pytest.raises(SyncFailed, match="still computes with the weights before version 3: .* off those of the new"):
        sync.sync(model, 3)


def test_without_checksums_or_a_tolerance_a_gap_of_bfloat16_is_not_let_pass(
    model: torch.nn.Module, tmp_path: Path
) -> None:
    with serve(HoldingEngine(make_model(), torch.bfloat16)) as engine:
        engine.has_checksums = False
        with pytest.raises(SyncFailed, match="up to .* off the trainer's, and 0.001 is allowed"):
            weight_sync(engine, tmp_path / "w").sync(model, 1)


# -- what an engine makes of a checkpoint's tensors ------------------------------------------------------------------


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def held(tensors: Mapping[str, torch.Tensor], rank: str = "dp0:pp0:pcp0:tp0:") -> dict[str, str]:
    return {rank + name: digest(tensor) for name, tensor in tensors.items()}


def sent(tensors: Mapping[str, torch.Tensor]) -> SentDigests:
    digests = SentDigests()
    for _ in digests.watch(tensors.items()):
        pass
    return digests


ROWS = {name: torch.randn(4, 8) for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")}
CHECKPOINT = {f"layers.0.{name}.weight": rows for name, rows in ROWS.items()} | {"norm.weight": torch.randn(8)}
JOINED = {
    "layers.0.qkv_proj.weight": torch.cat([ROWS["q_proj"], ROWS["k_proj"], ROWS["v_proj"]]),
    "layers.0.gate_up_proj.weight": torch.cat([ROWS["gate_proj"], ROWS["up_proj"]]),
    "norm.weight": CHECKPOINT["norm.weight"],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_joined_tensors_are_proven_in_the_dtype_that_matches(dtype: torch.dtype) -> None:
    proof = EngineProof("http://e")
    assert proof.check(sent(CHECKPOINT), held({name: tensor.to(dtype) for name, tensor in JOINED.items()})) == 3
    assert proof.dtype == str(dtype).removeprefix("torch.")


def test_a_vocabulary_ends_in_rows_of_zeros() -> None:
    rows = torch.randn(100, 8)
    padded = torch.cat([rows, torch.zeros(28, 8)])
    assert EngineProof("http://e").check(sent({"lm_head.weight": rows}), held({"lm_head.weight": padded})) == 1


def test_parts_that_come_in_another_order_and_quantized_modules_are_left_out() -> None:
    backwards = dict(reversed(CHECKPOINT.items()))
    assert EngineProof("http://e").check(sent(backwards), held(JOINED)) == 1
    quantized = JOINED | {
        "layers.0.qkv_proj.weight": torch.ones(12, 8),
        "layers.0.qkv_proj.weight_scale": torch.ones(1),
    }
    assert EngineProof("http://e").check(sent(CHECKPOINT), held(quantized)) == 2


def split(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """As two GPUs have them: norms whole, all others by halves."""
    halves = {name: tensor.chunk(2) if tensor.dim() > 1 else (tensor, tensor) for name, tensor in tensors.items()}
    ranks = ({name: half[rank] for name, half in halves.items()} for rank in (0, 1))
    return {
        key: found for rank, part in enumerate(ranks) for key, found in held(part, f"dp0:pp0:pcp0:tp{rank}:").items()
    }


def test_of_split_tensors_each_must_change_with_what_it_is_made_of() -> None:
    proof = EngineProof("http://e")
    assert proof.check(sent(CHECKPOINT), split(JOINED)) == 1, "at first, only what every GPU has whole"
    learned = CHECKPOINT | {"layers.0.v_proj.weight": ROWS["v_proj"] + 1}
    qkv = torch.cat([ROWS["q_proj"], ROWS["k_proj"], ROWS["v_proj"] + 1])
    assert proof.check(sent(learned), split(JOINED | {"layers.0.qkv_proj.weight": qkv})) == 3
    with pytest.raises(SyncFailed, match=r"1 of its 3 tensors .* such as layers.0.qkv_proj.weight\."):
        proof.check(sent(CHECKPOINT), split(JOINED | {"layers.0.qkv_proj.weight": qkv}))
