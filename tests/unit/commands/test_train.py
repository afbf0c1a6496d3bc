from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints

import pytest

from rig.fake_engine import FakeEngine
from rig.threads import in_thread
from stepwell.commands.processes import StartupScreen
from stepwell.commands.train import (
    TrainSettings,
    load_validation,
    read_validation,
    require_engines,
    require_model,
    trainer_settings,
)
from stepwell.engines.engine import EngineControl
from stepwell.engines.vllm_control import VllmControl
from stepwell.errors import BadRequest, NotReady
from stepwell.trainers.algorithms import AlgorithmKind


def settings(**values: Any) -> TrainSettings:
    return TrainSettings(model=Path("model"), **values)


def test_the_algorithm_decides_what_no_flag_sets() -> None:
    made = trainer_settings(settings(algorithm="rloo", groups=3, updates=7))

    assert (made.algorithm, made.baseline, made.importance_cap) == ("rloo", "leave_one_out", 2.0)
    assert (made.groups, made.updates, made.learning_rate, made.channel) == (3, 7, None, "train")


def test_every_algorithm_of_the_trainer_can_be_named() -> None:
    assert get_args(get_type_hints(TrainSettings)["algorithm"]) == get_args(AlgorithmKind)


def test_a_name_of_the_hub_is_refused_with_the_command_that_fetches_it() -> None:
    with pytest.raises(BadRequest, match=r"--model Qwen/Qwen3-0\.6B is no model folder.*hf download"):
        require_model(Path("Qwen/Qwen3-0.6B"))


def test_a_pool_without_engines_is_refused() -> None:
    with pytest.raises(NotReady, match="lists no engines"):
        require_engines([])


def test_an_engine_without_control_routes_is_refused_with_the_command_that_starts_one() -> None:
    with in_thread(FakeEngine(plain=True)) as engine:
        controls = cast("Sequence[EngineControl]", [VllmControl(engine.url)])
        with pytest.raises(NotReady, match=r"takes no weights: .*VLLM_SERVER_DEV_MODE=1 vllm serve MODEL"):
            require_engines(controls)


@pytest.mark.parametrize(
    ("returned", "mean", "tasks"), [(0.5, 0.5, 0), ({"a": 1, "b": 0.0}, 0.5, 2), (1, 1.0, 0)], ids=str
)
def test_a_validation_is_a_number_or_numbers_by_task(returned: object, mean: float, tasks: int) -> None:
    assert read_validation(3, returned) == (3, mean, tasks)


@pytest.mark.parametrize("returned", [None, "0.5", {}, {"a": None}, {"a": 1.0, "b": "x"}, float("nan")], ids=repr)
def test_what_is_no_number_is_refused(returned: object) -> None:
    with pytest.raises(BadRequest, match="it returns a number, or"):
        read_validation(0, returned)


def test_a_validation_is_a_function(tmp_path: Path) -> None:
    (tmp_path / "held_out.py").write_text("score = 3\n")
    with pytest.raises(BadRequest, match="no function but a int"):
        load_validation(f"{tmp_path / 'held_out.py'}:score")


def test_the_screen_shows_a_wait_until_the_next_update() -> None:
    out = StringIO()
    screen = StartupScreen(out, clock=lambda: 0.0)
    screen.wait("a batch", "0 of 4 groups are ready")
    screen.say("update 1", instead_of="a batch")
    screen.wait("b", "c")
    assert out.getvalue().splitlines()[-1].endswith("waiting for b: c")
