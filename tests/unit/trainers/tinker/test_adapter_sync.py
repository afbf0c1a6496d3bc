"""Adapters under names that never stand for other weights, at all engines before the channel's calls go to them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from stepwell.errors import BadRequest, SyncFailed
from stepwell.pool.api.policy import ChannelPolicy
from stepwell.trainers.tinker.adapter_sync import AdapterSync
from tests.unit.trainers.scripted_engine import serve
from tests.unit.trainers.tinker.adapter_engine import AdapterEngine
from tests.unit.trainers.tinker.fake_tinker import adapter_archive
from tests.unit.trainers.training_pool import TrainingPool

NOBODY = "http://127.0.0.1:9"


@pytest.fixture
def engine() -> Iterator[AdapterEngine]:
    with serve(AdapterEngine()) as engine:
        yield engine


@pytest.fixture
def pool() -> TrainingPool:
    return TrainingPool()


def sync_of(pool: TrainingPool, folder: Path, *engines: str, channel: str = "east") -> AdapterSync:
    return AdapterSync(pool, channel, folder, engines=engines, background=False, timeout=5.0)


def test_the_channels_calls_go_to_an_adapter_that_the_engine_has(
    pool: TrainingPool, engine: AdapterEngine, tmp_path: Path
) -> None:
    name = sync_of(pool, tmp_path, engine.url).publish(adapter_archive(b"one"), 3)
    assert name.startswith("east-v3-")
    assert pool.channel_policy("east") == ChannelPolicy("east", name, 3)
    assert pool.channel_policy("west") == ChannelPolicy("west")
    assert Path(engine.adapters[name]).joinpath("adapter_model.safetensors").read_bytes() == b"one"
    assert "/pause" not in " ".join(engine.calls)


def test_other_weights_have_another_name_even_under_the_same_version(
    pool: TrainingPool, engine: AdapterEngine, tmp_path: Path
) -> None:
    sync = sync_of(pool, tmp_path, engine.url)
    one, same, other = (sync.publish(adapter_archive(weights), 1) for weights in (b"one", b"one", b"other"))
    assert one == same != other
    assert engine.loaded == [one, other]


def test_old_adapters_leave_and_those_of_other_channels_stay(
    pool: TrainingPool, engine: AdapterEngine, tmp_path: Path
) -> None:
    west = sync_of(pool, tmp_path, engine.url, channel="east-v1").publish(adapter_archive(b"west"), 1)
    engine.adapters["east-v0-00000000"] = "of a run before"
    sync = sync_of(pool, tmp_path, engine.url)
    names = [sync.publish(adapter_archive(str(version).encode()), version) for version in range(1, 7)]
    assert set(engine.adapters) == {west, *names[-2:]}
    assert {place.name for place in tmp_path.iterdir()} == {west, *names[-4:]}, "an engine may read one again"


def test_an_engine_that_restarted_gets_the_newest_ones_again(
    pool: TrainingPool, engine: AdapterEngine, tmp_path: Path
) -> None:
    sync = sync_of(pool, tmp_path, engine.url)
    names = [sync.publish(adapter_archive(str(version).encode()), version) for version in (1, 2)]
    assert sync.catch_up() == []
    engine.adapters.clear()
    assert sync.catch_up() == [engine.url]
    assert list(engine.adapters) == names


def test_an_engine_that_is_away_does_not_hold_up_the_others(
    pool: TrainingPool, engine: AdapterEngine, tmp_path: Path
) -> None:
    name = sync_of(pool, tmp_path, NOBODY, engine.url).publish(adapter_archive(b"one"), 1)
    assert name in engine.adapters
    with pytest.raises(SyncFailed, match="no engine answers"):
        sync_of(pool, tmp_path, NOBODY).publish(adapter_archive(b"two"), 2)
    assert pool.channel_policy("east").version == 1


def test_an_adapter_that_an_engine_refuses_is_not_served(
    pool: TrainingPool, engine: AdapterEngine, tmp_path: Path
) -> None:
    engine.fails_at = "/v1/load_lora_adapter"
    with pytest.raises(SyncFailed, match="/v1/load_lora_adapter answered 500"):
        sync_of(pool, tmp_path, engine.url).publish(adapter_archive(b"one"), 1)
    assert pool.channel_policy("east") == ChannelPolicy("east")


@pytest.mark.parametrize(
    "archive",
    [b"torn", adapter_archive(b"x", ["adapter_config.json"]), adapter_archive(b"x", ["adapter_model.safetensors"])],
)
def test_what_is_no_adapter_is_refused(
    pool: TrainingPool, engine: AdapterEngine, tmp_path: Path, archive: bytes
) -> None:
    with pytest.raises(SyncFailed, match="is not a PEFT adapter"):
        sync_of(pool, tmp_path, engine.url).publish(archive, 1)


def test_an_archive_writes_nowhere_else(pool: TrainingPool, engine: AdapterEngine, tmp_path: Path) -> None:
    names = ["../../adapter_model.safetensors", "a/b/adapter_config.json", "../more.py"]
    name = sync_of(pool, tmp_path / "a" / "b", engine.url).publish(adapter_archive(b"one", names), 1)
    files = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()}
    assert files == {f"a/b/{name}/adapter_model.safetensors", f"a/b/{name}/adapter_config.json"}


def test_a_channel_must_be_fit_for_a_name(pool: TrainingPool, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="cannot be part of an adapter's name"):
        sync_of(pool, tmp_path, channel="../east")
