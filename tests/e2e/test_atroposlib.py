"""atroposlib 0.4.0 as published: its environment and its example trainer's client, at our server and at its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from stepwell.pool.actors import start_pool

from rig.atropos import GROUPS, QUEUE_LIMIT, Consumed, atropos_server, consume
from rig.atropos.server import atropos_process
from rig.ray_cluster import RayCluster
from stepwell.pool.api.plan import PoolPlan

FIELDS = {
    *("tokens", "masks", "scores", "advantages", "ref_logprobs", "messages", "generation_params"),
    *("inference_logprobs", "overrides", "group_overrides", "images", "env_id", "distill_token_ids"),
    "distill_logprobs",
}


@pytest.fixture(scope="module")
def theirs(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Consumed:
    folder = tmp_path_factory.mktemp("theirs")
    with atropos_server(folder / "server.log") as url:
        return consume(url, tiny_model, folder)


@pytest.fixture(scope="module")
def ours(ray_cluster: RayCluster, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Consumed]:
    folder = tmp_path_factory.mktemp("ours")
    with ray_cluster.namespace() as namespace:
        start_pool(PoolPlan(), namespace)
        with atropos_process(
            folder / "atropos.log", ray_address=ray_cluster.address, ray_namespace=namespace
        ) as server:
            yield consume(server.url, tiny_model, folder)


def test_the_same_environment_and_trainer_give_the_same_groups(ours: Consumed, theirs: Consumed) -> None:
    same = {name: {field: group[field] for field in FIELDS} for name, group in ours.by_name().items()}
    assert len(same) == GROUPS
    assert same == theirs.by_name()


def test_a_batch_has_what_the_protocol_has_and_the_policy_version(ours: Consumed, theirs: Consumed) -> None:
    assert {frozenset(group) for group in theirs.groups} == {frozenset(FIELDS)}
    assert {frozenset(group) for group in ours.groups} == {frozenset(FIELDS | {"policy_versions", "temperatures"})}


@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_the_environment_pauses_while_the_trainer_is_away_and_goes_on_afterwards(
    whose: str, request: pytest.FixtureRequest
) -> None:
    consumed: Consumed = request.getfixturevalue(whose)
    assert QUEUE_LIMIT <= max(consumed.away) < GROUPS
    assert len(set(consumed.away[-10:])) == 1  # a second in which nothing came
    assert len(consumed.by_name()) == GROUPS
