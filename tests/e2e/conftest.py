from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rig.vllm_server import VllmServer, start_vllm


@pytest.fixture(scope="session")
def vllm(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """The real engine, one for the whole run: a test that changes its weights puts the tiny model's back."""
    with start_vllm(tiny_model, log=tmp_path_factory.mktemp("vllm") / "vllm.log") as server:
        yield server
