"""docs/training.md: its Python is run from top to bottom, over a pool in this process and an engine that loads what it
is given; its commands are held against those that start the tests' own vLLM."""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from stepwell.demo.engine import FLAGS
from stepwell.trainers.reporting import UpdateMetrics
from stepwell.trainers.settings import Settings
from stepwell.trainers.weight_sync import PROBE, probe_logprobs
from tests.unit.trainers.models import one_turn
from tests.unit.trainers.scripted_engine import ScriptedEngine, serve
from tests.unit.trainers.training_pool import TrainingPool

PAGE = (Path(__file__).parents[3] / "docs" / "training.md").read_text()
GROUPS, UPDATES = 2, 3


def examples(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)


class LoadingEngine(ScriptedEngine):
    """Computes with the weights that it was told to load, as vLLM does."""

    _loading = Lock()
    """transformers changes torch while it loads, so two engines in one process take turns."""

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        if path == "/collective_rpc":
            with self._loading:
                model = AutoModelForCausalLM.from_pretrained(body["kwargs"]["weights_path"], dtype=torch.float32)
            self.logprobs = probe_logprobs(model, PROBE)
        return super().answer(path, body)


@pytest.fixture
def engine() -> Iterator[LoadingEngine]:
    engine = LoadingEngine()
    with serve(engine):
        yield engine


@pytest.fixture
def pool() -> TrainingPool:
    """With as many groups as the page trains, and one update more."""
    pool = TrainingPool()
    for number in range(GROUPS * (UPDATES + 1)):
        rollouts = [([one_turn(f"{number}-{n}", f"p{number}", [1, 2, number], [3, 4 + n])], float(n)) for n in (0, 1)]
        pool.add_group(f"p{number}", rollouts)
    return pool


def test_the_page_trains_and_the_engine_has_its_weights(
    pool: TrainingPool,
    engine: LoadingEngine,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ours = {
        'connect("data_pool")': "the_tests_pool",
        'Path("model")': f"Path({str(tiny_model)!r})",
        "http://127.0.0.1:8001": engine.url,
        "groups=16, updates=100": f"groups={GROUPS}, updates={UPDATES}",
    }
    program = "\n".join(examples("python"))
    for theirs, own in ours.items():
        assert theirs in program
        program = program.replace(theirs, own)

    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"the_tests_pool": pool}
    exec(program, scope)

    updates = range(1, UPDATES + 2)
    assert re.findall(r"^update +(\d+)  reward  0\.500", capsys.readouterr().out, re.M) == [str(n) for n in updates]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == len(updates)
    assert len(pool.acknowledged) == len(updates)
    assert pool.held == 0
    assert scope["report"].logprob_gap < 1e-3
    assert engine.weight_version == str(pool.stats().policy_version) == str(scope["report"].version)
    assert {path.name for path in (tmp_path / "weights").iterdir()} == {"a", "b"}
    assert (tmp_path / "checkpoints" / "trainer.pt").exists()


def test_the_cure_for_cpus_is_in_the_folder_that_the_page_finds() -> None:
    (block,) = [block for block in examples("bash") if "PYTHONPATH" in block]
    command = block.replace("python -c", f"{sys.executable} -c") + "echo $PYTHONPATH"
    shown = subprocess.run(["bash", "-ec", command], capture_output=True, text=True, check=True).stdout
    module, _, kind = FLAGS[FLAGS.index("--worker-extension-cls") + 1].partition(".")
    assert f"class {kind}:" in (Path(shown.strip()) / f"{module}.py").read_text()


def test_every_setting_is_listed_with_its_default() -> None:
    table = PAGE.partition("| setting |")[2].partition("\n\n")[0]
    listed: dict[str, str] = {}
    for names, defaults in re.findall(r"^\| (`.*?`) \| (.*?) \|", table, re.M):
        listed |= zip(re.findall(r"`(\w+)`", names), defaults.replace("`", "").split(", "), strict=True)
    defaults = {field.name: getattr(Settings(), field.name) for field in fields(Settings) if field.name[0] != "_"}
    assert listed.keys() == defaults.keys()
    for name, default in defaults.items():
        shown = listed[name]
        if default is None or isinstance(default, bool):
            assert shown == ("none" if default is None else str(default)), name
        else:
            assert type(default)(shown) == default, name


def test_every_metric_is_listed() -> None:
    table = PAGE.partition("| metric |")[2]
    listed = [name for names in re.findall(r"^\| (`.*?) \|", table, re.M) for name in re.findall(r"`(\w+)`", names)]
    assert sorted(listed) == sorted(field.name for field in fields(UpdateMetrics))
