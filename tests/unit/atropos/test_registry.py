from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from stepwell.atropos.registry import SILENCE, Registries, Registry, RegistryFile
from stepwell.pool.api.leasing import ReadyGroups
from stepwell.wire.scored_groups import EnvRegistration, TrainerRegistration

EMPTY = ReadyGroups({})


def trainer(**changes: Any) -> TrainerRegistration:
    values: dict[str, Any] = {
        "wandb_group": "g",
        "wandb_project": "p",
        "batch_size": 16,
        "max_token_len": 9,
        "checkpoint_dir": "",
        "save_checkpoint_interval": 1,
        "starting_step": 0,
        "num_steps": 5,
    }
    return TrainerRegistration(**{**values, **changes})


def environment(name: str = "env", **changes: Any) -> EnvRegistration:
    values: dict[str, Any] = {"max_token_length": 10, "desired_name": name, "weight": 1.0, "group_size": 4}
    return EnvRegistration(**{**values, **changes})


@pytest.mark.parametrize("field", ["batch_size", "num_steps", "starting_step", "max_token_len"])
def test_a_number_that_no_answer_could_hold_is_refused(field: str) -> None:
    with pytest.raises(ValidationError, match="less than 9223372036854775808"):
        trainer(**{field: 2**64})


def test_names_are_unique_though_environments_leave() -> None:
    registry = Registry()
    first = registry.register_env(environment(), 0)
    first.is_disconnected = True
    names = [registry.register_env(environment(name), 0).name for name in ("env", "other", "env")]
    assert [first.name, *names] == ["env_0", "env_1", "other_0", "env_2"]


@pytest.mark.parametrize("env_id", [None, -1, 1, 2**70])
def test_a_number_that_no_environment_has_is_no_one(env_id: int | None) -> None:
    registry = Registry()
    registry.register_env(environment(), 0)
    assert registry.heard_from(env_id, 0) is None


def test_weights_are_shares_of_context_times_weight_among_those_connected() -> None:
    registry = Registry()
    short, long = (registry.register_env(environment(max_token_length=n), 0) for n in (10, 30))
    negative = registry.register_env(environment(weight=-5), 0)
    assert [registry.weight(each, 0) for each in (short, long, negative)] == [0.25, 0.75, 0.01]
    long.is_disconnected = True
    assert registry.weight(short, 0) == 1.0


def test_one_that_is_silent_for_long_counts_no_more_until_it_speaks() -> None:
    registry = Registry()
    registry.register_env(environment(min_batch_allocation=0.5), 0)
    talks = registry.register_env(environment(), 0)
    assert registry.shares(SILENCE) == {"env_0": 0.5}
    late = SILENCE + 1
    registry.heard_from(registry.environments.index(talks), late)
    assert registry.shares(late) == {}
    assert registry.weight(talks, late) == 1.0
    registry.heard_from(0, late)
    assert registry.shares(late) == {"env_0": 0.5}
    assert registry.weight(talks, late) == 0.5


def test_one_that_said_goodbye_stays_away_though_something_of_it_still_comes() -> None:
    registry = Registry()
    leaves = registry.register_env(environment(min_batch_allocation=0.5), 0)
    leaves.is_disconnected = True
    registry.heard_from(registry.environments.index(leaves), 1)
    assert registry.shares(1) == {}


def test_the_queue_of_an_environment_is_all_but_what_others_minimums_claim() -> None:
    registry = Registry()
    registry.register(trainer())
    own = registry.register_env(environment(group_size=4), 0)
    registry.register_env(environment("other", min_batch_allocation=0.25), 0)
    backlog = ReadyGroups({"env_0": {4: 3}, "other_0": {2: 5, 4: 1}, "": {1: 2}})
    status = registry.env_status(own, backlog, 0)
    packed_other, packed_agents = 16, 4  # 14 and 2 sequences in groups of 4
    assert status.queue_size == (12 + (packed_other - 4) + packed_agents) // 4
    assert (status.self_queue_size, status.max_group_size, status.unallocated_fraction) == (3, 4, 0.75)


def test_groups_larger_than_registered_count_as_what_they_are() -> None:
    registry = Registry()
    own = registry.register_env(environment(group_size=2), 0)
    status = registry.env_status(own, ReadyGroups({"env_0": {2: 1, 6: 2}}), 0)
    assert (status.self_queue_size, status.queue_size) == (14 // 6, 14 // 6)


def test_minimums_beyond_a_whole_batch_leave_nothing_unallocated() -> None:
    registry = Registry()
    own = registry.register_env(environment(min_batch_allocation=0.8), 0)
    registry.register_env(environment(min_batch_allocation=0.8), 0)
    assert registry.env_status(own, EMPTY, 0).unallocated_fraction == 0.0


def test_the_same_registration_again_keeps_the_step_and_another_sets_it() -> None:
    registry = Registry()
    registry.register(trainer(starting_step=2))
    registry.step += 1
    registry.register(trainer(starting_step=2))
    assert registry.step == 3
    registry.register(trainer(starting_step=2, batch_size=8))
    assert registry.step == 2


async def test_a_restored_registry_is_the_same_and_gives_everyone_time_to_speak(tmp_path: Path) -> None:
    file = RegistryFile(tmp_path / "state.json")
    registries = Registries(file, now=0)
    registry = registries.open("train")
    registry.register(trainer())
    registry.is_started, registry.step = True, 4
    registry.register_env(environment(min_batch_allocation=0.5), 0)
    registry.register_env(environment(), 0).is_disconnected = True
    await registries.save()
    again = Registries(file, now=10_000).of("train")
    assert (again.trainer, again.is_started, again.step) == (trainer(), True, 4)
    assert [(known.name, known.wanted, known.is_disconnected) for known in again.environments] == [
        ("env_0", environment(min_batch_allocation=0.5), False),
        ("env_1", environment(), True),
    ]
    assert again.shares(10_000 + SILENCE) == {"env_0": 0.5}
    assert again.register_env(environment(), 10_000).name == "env_2"
    assert "heard_at" not in (tmp_path / "state.json").read_text()
