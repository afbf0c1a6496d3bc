"""D6: with `--sync full`, what was acknowledged survives a loss of power; with `normal`, it survives a kill only."""

from pathlib import Path

import pytest

from tests.rig.power_loss.lost_power import run_until_killed, survivors
from tests.rig.preloads import SYNCED_ONLY, build, has_compiler

pytestmark = pytest.mark.skipif(not has_compiler(), reason="needs gcc")


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(SYNCED_ONLY, tmp_path_factory.mktemp("shim"))


@pytest.mark.parametrize("acknowledged", [1, 57, 400])
def test_under_full_all_that_was_acknowledged_survives_a_loss_of_power(
    shim: Path, tmp_path: Path, acknowledged: int
) -> None:
    done = run_until_killed(shim, tmp_path, "full", acknowledged)
    assert len(done) >= acknowledged
    assert done <= survivors(tmp_path / "synced" / "data_pool.sqlite")


def test_under_normal_a_kill_costs_nothing_and_a_loss_of_power_the_last_changes(shim: Path, tmp_path: Path) -> None:
    done = run_until_killed(shim, tmp_path, "normal", 200)
    assert done <= survivors(tmp_path / "live" / "data_pool.sqlite")
    synced = tmp_path / "synced" / "data_pool.sqlite"
    assert not synced.exists() or len(done & survivors(synced)) < len(done)
