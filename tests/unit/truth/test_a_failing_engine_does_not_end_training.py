"""T8: one dead replica ended training, and an engine that failed in mid-update was resumed under its old version."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from rig.waiting import wait_until
from stepwell.errors import SyncFailed
from stepwell.trainers.transfers import CheckpointTransfer
from stepwell.trainers.weight_sync import WeightSync, probe_logprobs
from tests.unit.trainers.models import Recurrent
from tests.unit.trainers.scripted_engine import ScriptedEngine, serve

PROBE = [1, 2, 3, 4]
NOBODY = "http://127.0.0.1:1"


class ListedEngines:
    """As much of a pool as a weight sync uses."""

    def __init__(self, *engines: str) -> None:
        self.listed = list(engines)
        self.version = 0

    def engines(self) -> Sequence[str]:
        return tuple(self.listed)

    def set_policy_version(self, version: int, *, check: bool = True) -> None:
        self.version = version

    def announce_sync(self) -> None:
        """No gateway holds calls here."""


@pytest.fixture
def model() -> torch.nn.Module:
    return Recurrent(dropout=0.0)


@pytest.fixture
def engines(model: torch.nn.Module) -> Iterator[list[ScriptedEngine]]:
    """They tell the log-probabilities of the model."""
    with ExitStack() as stack:
        found = [stack.enter_context(serve(ScriptedEngine())) for _ in range(3)]
        for engine in found:
            engine.logprobs = probe_logprobs(model, PROBE)
        yield found


def weight_sync(pool: ListedEngines, folder: Path, **options: Any) -> WeightSync:
    return WeightSync(transfer=CheckpointTransfer(folder), pool=pool, probe=PROBE, **options)


def test_a_dead_engine_is_left_out_and_the_others_get_the_weights(
    engines: list[ScriptedEngine], model: torch.nn.Module, tmp_path: Path
) -> None:
    pool = ListedEngines(engines[0].url, NOBODY, engines[1].url)
    report = weight_sync(pool, tmp_path / "w").sync(model, 1)
    assert [engine.weight_version for engine in engines[:2]] == ["1", "1"]
    assert pool.version == 1
    assert list(report.left_out) == [NOBODY]


def test_without_any_engine_left_the_sync_fails_and_the_pool_keeps_its_version(
    model: torch.nn.Module, tmp_path: Path
) -> None:
    pool = ListedEngines(NOBODY)
    with pytest.raises(SyncFailed, match=NOBODY):
        weight_sync(pool, tmp_path / "w").sync(model, 1)
    assert pool.version == 0


def test_each_sync_goes_to_the_engines_that_are_listed_then(
    engines: list[ScriptedEngine], model: torch.nn.Module, tmp_path: Path
) -> None:
    pool = ListedEngines(engines[0].url, engines[1].url)
    sync = weight_sync(pool, tmp_path / "w")
    sync.sync(model, 1)
    pool.listed = [engines[1].url, engines[2].url]
    sync.sync(model, 2)
    assert [engine.weight_version for engine in engines] == ["1", "2", "2"]


def test_an_engine_that_times_out_in_mid_update_is_not_resumed_and_has_no_version(
    engines: list[ScriptedEngine], model: torch.nn.Module, tmp_path: Path
) -> None:
    slow, other = engines[:2]
    pool = ListedEngines(slow.url, other.url)
    sync = weight_sync(pool, tmp_path / "w", timeout=2.0)
    sync.sync(model, 1)
    slow.may_answer.clear()
    sync.sync(model, 2)
    assert (other.weight_version, other.is_paused) == ("2", False)
    assert (slow.weight_version, slow.is_paused) == ("changing from 1", True)
    slow.may_answer.set()


@pytest.mark.parametrize("at", ["/collective_rpc", "/reset_prefix_cache"])
def test_an_engine_that_refuses_an_update_has_no_version_and_breaks_its_calls_off(
    engines: list[ScriptedEngine], model: torch.nn.Module, tmp_path: Path, at: str
) -> None:
    refusing, other = engines[:2]
    refusing.fails_at = at
    pool = ListedEngines(refusing.url, other.url)
    report = weight_sync(pool, tmp_path / "w").sync(model, 1)
    assert "answered 500" in report.left_out[refusing.url]
    assert (refusing.weight_version, refusing.is_paused) == ("changing from default", True)
    assert refusing.calls[-1] == "/pause?mode=abort"
    assert (other.weight_version, pool.version) == ("1", 1)


@pytest.mark.parametrize("at", ["/pause", "/update_weight_version"])
def test_an_engine_that_fails_before_its_update_keeps_serving_its_old_weights(
    engines: list[ScriptedEngine], model: torch.nn.Module, tmp_path: Path, at: str
) -> None:
    failing, other = engines[:2]
    failing.fails_at = at
    weight_sync(ListedEngines(failing.url, other.url), tmp_path / "w").sync(model, 1)
    assert (failing.weight_version, failing.is_paused) == ("default", False)
    assert "/collective_rpc" not in failing.calls


def test_an_engine_with_other_weights_than_the_trainers_loses_its_version(
    engines: list[ScriptedEngine], model: torch.nn.Module, tmp_path: Path
) -> None:
    wrong, other = engines[:2]
    wrong.logprobs[1] += 0.25
    report = weight_sync(ListedEngines(wrong.url, other.url), tmp_path / "w").sync(model, 1)
    assert "does not compute with the weights of version 1" in report.left_out[wrong.url]
    assert (wrong.weight_version, wrong.is_paused) == ("changing", True)


def test_a_newcomer_and_a_restarted_engine_get_the_last_weights_without_a_sync(
    engines: list[ScriptedEngine], model: torch.nn.Module, tmp_path: Path
) -> None:
    known, restarted, newcomer = engines
    pool = ListedEngines(known.url, restarted.url)
    sync = weight_sync(pool, tmp_path / "w")
    sync.sync(model, 1)
    before = len(known.calls)
    restarted.weight_version = "default"
    pool.listed.append(newcomer.url)
    wait_until(lambda: (restarted.weight_version, newcomer.weight_version) == ("1", "1"), "the engines to catch up")
    assert newcomer.bodies["/collective_rpc"] == known.bodies["/collective_rpc"]
    assert "/pause?mode=keep" not in known.calls[before:], "an engine that was up to date was paused"
    wait_until(lambda: not newcomer.is_paused, "the newcomer to be resumed")


def test_an_engine_that_failed_in_a_sync_is_tried_again(
    engines: list[ScriptedEngine], model: torch.nn.Module, tmp_path: Path
) -> None:
    failing, other = engines[:2]
    sync = weight_sync(ListedEngines(failing.url, other.url), tmp_path / "w")
    failing.fails_at = "/collective_rpc"
    sync.sync(model, 1)
    failing.fails_at = None
    wait_until(lambda: failing.weight_version == "1" and not failing.is_paused, "the engine to catch up")


def test_after_a_sync_that_failed_nothing_is_brought_up_to_date(
    engines: list[ScriptedEngine], model: torch.nn.Module, tmp_path: Path
) -> None:
    pool = ListedEngines(engines[0].url)
    sync = weight_sync(pool, tmp_path / "w")
    sync.sync(model, 1)
    engines[0].fails_at = "/collective_rpc"
    with pytest.raises(SyncFailed):
        sync.sync(model, 2)
    engines[0].fails_at = None
    assert sync.catch_up() == [], "the folder has weights that no engine has proved"
    assert engines[0].weight_version == "changing from 1"
