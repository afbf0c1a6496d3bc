"""T9: weights reach engines one tensor at a time: no whole model is copied, shards are gathered, adapters merged."""

import json
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from stepwell.common.listening import free_port
from stepwell.trainers.transfers import CheckpointTransfer, stream_weights
from stepwell.trainers.trl import StepwellWeightTransfer
from stepwell.trainers.weight_sync import WeightSync
from tests.unit.trainers.scripted_engine import ScriptedEngine, serve
from tests.unit.trainers.training_pool import TrainingPool

TENSORS = 24
NBYTES = 2**20
"""Of one tensor."""


class GatheredTensors:
    """Tensors that are made one by one, as a sharded trainer gathers them; counts those that are in memory."""

    def __init__(self) -> None:
        self.most_alive = 0
        self._alive = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(TENSORS):
            yield f"tensor-{number:02d}", self._make(number)

    def _make(self, number: int) -> torch.Tensor:
        array = np.full(NBYTES // 4, number, np.float32)
        weakref.finalize(array, self._free)
        self._alive += 1
        self.most_alive = max(self.most_alive, self._alive)
        return torch.from_numpy(array)

    def _free(self) -> None:
        self._alive -= 1


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    with serve(ScriptedEngine()) as engine:
        yield engine


def written(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_trls_tensors_are_written_file_by_file_and_freed(engine: ScriptedEngine, tmp_path: Path) -> None:
    pool, tensors = TrainingPool(), GatheredTensors()
    files = CheckpointTransfer(tmp_path / "w", max_file_bytes=4 * NBYTES)
    StepwellWeightTransfer(WeightSync([engine.url], transfer=files, probe=()), pool).send_weights(iter(tensors))
    assert tensors.most_alive <= 4 + 1, "a file, and the tensor that does not fit into it"
    found = written(tmp_path / "w" / "a")
    assert {name: tensor[0].item() for name, tensor in found.items()} == {f"tensor-{n:02d}": n for n in range(TENSORS)}
    index = json.loads((tmp_path / "w" / "a" / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == found.keys()
    assert len(set(index.values())) == TENSORS / 4


def test_a_smaller_model_leaves_no_file_of_a_larger_one(engine: ScriptedEngine, tmp_path: Path) -> None:
    sync = WeightSync([engine.url], transfer=CheckpointTransfer(tmp_path / "w", max_file_bytes=1), probe=())
    for version, names in enumerate(("abc", "abc", "a")):
        sync.sync({name: torch.zeros(2) for name in names}, version)
    assert [file.name for file in (tmp_path / "w" / "a").iterdir()] == ["model.safetensors"]
    assert written(tmp_path / "w" / "b").keys() == set("abc")


MEASURED = """
import re, sys, torch
from pathlib import Path
from stepwell.trainers.transfers import CheckpointTransfer
from stepwell.trainers.weight_sync import WeightSync

def megabytes(field):
    return int(re.search(field + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024

sync = WeightSync([sys.argv[1]], transfer=CheckpointTransfer(Path(sys.argv[2]), max_file_bytes=16 * 2**20), probe=())
sync.sync({"a": torch.zeros(2**20)}, 1)
Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from now on
before = megabytes("VmRSS")
sync.sync(((f"tensor-{n}", torch.full((2**20,), float(n))) for n in range(64)), 2)
print(megabytes("VmHWM") - before)
"""


def test_the_memory_of_a_sync_does_not_grow_with_the_model(
    engine: ScriptedEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """64 tensors of 4 MiB, in files of 16 MiB."""
    command = (sys.executable, "-c", MEASURED, engine.url, str(tmp_path / "w"))
    megabytes = float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=120).stdout)
    with capsys.disabled():
        sys.stdout.write(
            f"\npeak memory of a sync of 256 MiB in files of 16 MiB: {megabytes:.0f} MiB more than before\n"
        )
    assert megabytes < 80


SHARDED = """
import os, sys, torch
from pathlib import Path
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from stepwell.trainers.transfers import CheckpointTransfer
from stepwell.trainers.weight_sync import WeightSync

url, folder = sys.argv[1:]
distributed.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
model = torch.nn.Linear(6, 5)
for name, parameter in list(model.named_parameters()):
    setattr(model, name, torch.nn.Parameter(distribute_tensor(parameter.data, mesh, [Shard(0)])))
report = WeightSync([url], transfer=CheckpointTransfer(Path(folder)), probe=()).sync(model, 1)
print(report.version)
distributed.destroy_process_group()
"""


def test_of_a_sharded_model_rank_0_sends_whole_tensors(engine: ScriptedEngine, tmp_path: Path) -> None:
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1"))}
    ranks = [
        subprocess.Popen(
            (sys.executable, "-c", SHARDED, engine.url, str(tmp_path / "w")),
            env={**os.environ, **place, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    answers = [rank.communicate(timeout=120) for rank in ranks]
    assert [out for out, _ in answers] == ["1\n", "1\n"], answers
    torch.manual_seed(0)
    expected = torch.nn.Linear(6, 5).state_dict()
    found = written(tmp_path / "w" / "a")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert engine.calls.count("/collective_rpc") == 1, "rank 1 has nothing to do with engines"


def test_adapters_are_merged_and_the_trained_model_stays_as_it_is() -> None:
    peft = pytest.importorskip("peft")
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    base: torch.nn.Module = Qwen2ForCausalLM(config)  # type: ignore[no-untyped-call]
    names = set(base.state_dict())
    adapters = peft.LoraConfig(
        r=4, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"], init_lora_weights=False
    )
    model = peft.get_peft_model(base, adapters)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    streamed = {name: tensor.clone() for name, tensor in stream_weights(model)}
    merged = deepcopy(model).merge_and_unload().state_dict()
    assert streamed.keys() == names
    assert all(torch.equal(streamed[name], merged[name]) for name in names)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
