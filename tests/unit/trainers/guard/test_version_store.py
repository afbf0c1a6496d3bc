"""The guard's folder: weights of versions, and its state."""

from pathlib import Path

import pytest
import torch
from stepwell.trainers.guard.statistics import ComparisonState

from stepwell.errors import BadRequest
from stepwell.trainers.guard.policy_record import STATE_FILE, GuardState, VersionStore
from stepwell.trainers.learner import borrowed
from tests.unit.trainers.models import Bigram


def test_the_weights_of_a_version_come_back(tmp_path: Path) -> None:
    store = VersionStore(tmp_path / "guard")
    for version in (1, 2):
        store.save(Bigram(seed=version), version)
    again = VersionStore(tmp_path / "guard")
    assert again.versions() == [1, 2]
    model = Bigram(seed=3)
    model.load_state_dict(again.load(2))
    assert torch.equal(model.table.weight, Bigram(seed=2).table.weight)


def test_saved_weights_do_not_change_with_the_model(tmp_path: Path) -> None:
    store, model = VersionStore(tmp_path), Bigram(seed=1)
    store.save(model, 1)
    model.load_state_dict(Bigram(seed=2).state_dict())
    assert torch.equal(store.load(1)["table.weight"], Bigram(seed=1).table.weight)


def test_old_versions_go_but_those_that_are_needed(tmp_path: Path) -> None:
    store = VersionStore(tmp_path)
    for version in range(1, 7):
        store.save(Bigram(), version)
        store.save_scores({"a": version / 2}, version)
    store.prune(3, needed=[2])
    assert store.versions() == [2, 5, 6]
    assert [store.scores(version) for version in (1, 2, 5)] == [None, {"a": 1.0}, {"a": 2.5}]
    store.prune(1, needed=[2, 6])
    assert store.versions() == [2, 6]


def test_a_version_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        BadRequest,
        match=rf"^{tmp_path} does not have the weights of version 4; bring them back, or remove its guard.json",
    ):
        VersionStore(tmp_path).load(4)


def test_the_state_comes_back(tmp_path: Path) -> None:
    store = VersionStore(tmp_path)
    assert store.read_state() == GuardState()
    test = ComparisonState(comparisons=3, canary_waiting=[0.5], sessions={"a": 1})
    state = GuardState(stable=3, candidate=4, phase="testing", engines=["http://e"], test=test, cursor={"s": "7"})
    store.write_state(state)
    assert VersionStore(tmp_path).read_state() == state


def test_a_state_with_fields_of_another_release_is_read(tmp_path: Path) -> None:
    (tmp_path / STATE_FILE).write_text('{"stable": 3, "later": 1, "test": {"comparisons": 2, "later": 1}}')
    assert VersionStore(tmp_path).read_state() == GuardState(stable=3, test=ComparisonState(comparisons=2))


def test_a_state_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / STATE_FILE).write_text("[")
    with pytest.raises(BadRequest, match="guard.json cannot be read"):
        VersionStore(tmp_path).read_state()


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / "version-3.pt.77.part"
    left.write_bytes(b"half")
    assert VersionStore(tmp_path).versions() == []
    assert not left.exists()


def test_a_borrowed_model_has_its_own_weights_again(tmp_path: Path) -> None:
    model, other = Bigram(seed=1), Bigram(seed=2)
    with pytest.raises(KeyboardInterrupt), borrowed(model, dict(other.state_dict())):
        assert torch.equal(model.table.weight, other.table.weight)
        raise KeyboardInterrupt
    assert torch.equal(model.table.weight, Bigram(seed=1).table.weight)
