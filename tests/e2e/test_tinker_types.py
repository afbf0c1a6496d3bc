"""Our datums as the real tinker package's types, and our calls against its clients, in SkyRL's environment."""

from pathlib import Path
from typing import get_args

from rig.trainers.process import answer_of, start_program
from stepwell.trainers.tinker.tinker_settings import TinkerLoss


def test_a_row_is_a_datum_and_tinkers_clients_have_what_is_called(tmp_path: Path) -> None:
    log = tmp_path / "tinker.log"
    answer = answer_of(start_program("skyrl", "with_tinker_types.py", {}, log=log), log, timeout=300)
    assert answer["is_datum"]
    assert answer["inputs"] == [1, 2, 3]
    assert answer["fields"] == {
        "target_tokens": {"dtype": "int64", "shape": [3], "data": [2, 3, 4]},
        "logprobs": {"dtype": "float32", "shape": [3], "data": [0.0, -1.5, -0.25]},
        "advantages": {"dtype": "float32", "shape": [3], "data": [0.0, 0.5, -0.5]},
    }
    assert set(get_args(TinkerLoss)) <= set(answer["losses"])
    assert (answer["adam"]["learning_rate"], answer["adam"]["grad_clip_norm"]) == (1e-4, 1.0)
    assert answer["missing"] == []
