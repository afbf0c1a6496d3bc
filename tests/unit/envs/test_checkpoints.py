import json
from pathlib import Path

import pytest

from stepwell.envs.environment import Checkpoints, claim


def test_the_newest_at_or_before_a_step_is_found(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "env_0")
    for step in (2, 10, 9):
        checkpoints.write(step, {"position": step})
    assert checkpoints.newest(1) is None
    assert checkpoints.newest(9) == tmp_path / "env_0" / "step-9.json"
    assert checkpoints.newest(100) == tmp_path / "env_0" / "step-10.json"
    assert json.loads((tmp_path / "env_0" / "step-10.json").read_text()) == {"position": 10}
    assert sorted(path.name for path in (tmp_path / "env_0").iterdir() if path.suffix != ".json") == [".lock"]
    checkpoints.close()


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.write(1, {"position": 1})
    with pytest.raises(TypeError):
        checkpoints.write(1, {"position": object()})
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step-1.json"]
    assert json.loads((tmp_path / "step-1.json").read_text()) == {"position": 1}
    checkpoints.close()


def claimed(tmp_path: Path, name: str, step: int) -> Checkpoints:
    return claim(str(tmp_path), name, "env", step)


def test_a_folder_that_nobody_holds_is_gone_on_with_under_a_new_name(tmp_path: Path) -> None:
    first, second = claimed(tmp_path, "env_0", 0), claimed(tmp_path, "env_1", 0)
    first.write(2, {})
    second.write(2, {})
    second.close()
    third = claimed(tmp_path, "env_2", 3)
    assert third.folder == second.folder
    fourth = claimed(tmp_path, "env_3", 3)
    assert fourth.folder == tmp_path / "env_checkpoints" / "env_3"
    for each in (first, third, fourth):
        each.close()


def test_the_own_folder_comes_first_and_a_new_run_takes_no_old_state(tmp_path: Path) -> None:
    for name in ("env_0", "env_1", "envelope_0"):
        made = claimed(tmp_path, name, 0)
        made.write(2, {})
        made.close()
    own, fresh, other = claimed(tmp_path, "env_1", 2), claimed(tmp_path, "env_0", 0), claimed(tmp_path, "env_5", 1)
    assert [each.folder.name for each in (own, fresh, other)] == ["env_1", "env_0", "env_5"]
    for each in (own, fresh, other):
        each.close()
