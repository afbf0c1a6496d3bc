"""Batches as tensors, in an interpreter that has torch and numpy and neither Ray nor what else Stepwell installs."""

import os
import subprocess
from pathlib import Path

import pytest

from rig.vllm_server import vllm_python

CHECKOUT = Path(__file__).parents[2]

SETUP = """
import sys
import numpy as np
sys.modules["ray"] = None  # importing it fails, as where it is not installed
sys.modules["pyarrow"] = None
from stepwell.steps.columns import pack
from stepwell.pool.client.batch import make_batch
from rig.builders import make_step
steps = [
    make_step("a", step_index=0, response_ids=[3], reward=0.5),
    make_step("a", step_index=1, prompt_ids=[1, 2, 3, 9]),
    make_step("b", step_index=0),
]
batch = make_batch(pack(steps), [3])
def freeze(holder):
    for name in type(holder).__dataclass_fields__:
        if isinstance(array := getattr(holder, name), np.ndarray):
            array.flags.writeable = False
"""


@pytest.fixture(scope="module")
def python() -> Path:
    return vllm_python()


def run(python: Path, program: str) -> None:
    """Run it there with warnings as errors; its assertions are the test's."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(CHECKOUT / "src"), str(CHECKOUT)])}
    command = [str(python), "-W", "error", "-c", SETUP + program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_batch_becomes_tensors_under_the_names_of_its_arrays(python: Path) -> None:
    run(
        python,
        """
tensors = batch.to_torch()
assert tensors["tokens"].tolist() == batch.columns.tokens.tolist()
assert tensors["token_offsets_S"].tolist() == [0, 3, 9, 13]
assert tensors["trajectory_of_S"].tolist() == [0, 0, 1]
assert tensors["group_sizes_G"].tolist() == [3]
assert tensors["rewards_T"].isnan().tolist() == [False, True]
""",
    )


def test_a_tensor_shares_memory_that_may_be_written(python: Path) -> None:
    run(
        python,
        """
batch.to_torch()["tokens"][0] = 77
assert batch.columns.tokens[0] == 77
""",
    )


def test_a_tensor_of_read_only_memory_is_a_copy_and_no_warning(python: Path) -> None:
    run(
        python,
        """
freeze(batch.columns)
freeze(batch)
batch.to_torch()["tokens"][0] = 77
assert batch.columns.tokens[0] == 1
""",
    )


def test_padded_and_merged_rows_become_tensors_a_model_can_take(python: Path) -> None:
    run(
        python,
        """
import torch
freeze(batch.columns)
padded = batch.padded(4, 2).to_torch()
assert padded["input_ids_S_T"].dtype == torch.int64
assert padded["responses_S_R"].tolist() == [[3, 0], [3, 4], [3, 4]]
assert (1 - padded["response_mask_S_R"]).tolist() == [[0, 1], [0, 0], [0, 0]]
merged = batch.merged()
assert merged.to_torch()["weights_R"].tolist() == [1.0, 1.0]
rows = merged.padded(6).to_torch()
assert rows["input_ids_R_L"].tolist() == [[1, 2, 3, 9, 3, 4], [1, 2, 3, 4, 0, 0]]
embedded = torch.nn.Embedding(10, 3)(rows["input_ids_R_L"]) * rows["attention_mask_R_L"].unsqueeze(-1)
assert embedded.shape == (2, 6, 3)
""",
    )
