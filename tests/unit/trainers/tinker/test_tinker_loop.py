"""The loop over the pool's own rules and a service that forgets nothing: what is in the weights after a kill."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stepwell.errors import BadRequest, FetchTimeout, NothingLearned, SyncFailed
from stepwell.pool.api.producing import Registration
from stepwell.trainers.feed import read_state
from stepwell.trainers.tinker.adapter_sync import AdapterSync
from stepwell.trainers.tinker.tinker_loop import FILE, TinkerRecord, TinkerTrainer, TinkerUpdate, run_side_by_side
from stepwell.trainers.tinker.tinker_settings import TinkerSettings
from tests.unit.trainers.models import one_turn
from tests.unit.trainers.scripted_engine import serve
from tests.unit.trainers.tinker.adapter_engine import AdapterEngine
from tests.unit.trainers.tinker.fake_tinker import FakeTinker, install, serve_archives
from tests.unit.trainers.training_pool import TrainingPool

GROUPS = 4
CALLS = ("forward_backward", "optim_step", "save_state", "save_weights_for_sampler")


@pytest.fixture
def engine() -> Iterator[AdapterEngine]:
    with serve(AdapterEngine()) as engine:
        yield engine


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTinker]:
    install(monkeypatch)
    with serve_archives(FakeTinker()) as service:
        yield service


def add(
    pool: TrainingPool, number: int, channel: str = "east", rewards: tuple[float, float] = (1.0, 0.0), **step: Any
) -> None:
    """A group of two rollouts. Its prompt is one token, its number."""
    prompt = f"{channel}{number}"
    for n, reward in enumerate(rewards):
        uid = f"{prompt}-{n}"
        pool._run(pool.local.register_trajectory(Registration(uid, prompt, channel, group_size=2)))
        pool._run(pool.local.submit_steps([one_turn(uid, prompt, [ord(channel[0]), number], [n], **step)]))
        pool._run(pool.local.complete_trajectory(uid, prompt, reward))


@pytest.fixture
def pool() -> TrainingPool:
    pool = TrainingPool()
    for number in range(GROUPS):
        add(pool, number)
    return pool


def all_rows(channel: str = "east") -> Counter[str]:
    return Counter(f"{ord(channel[0])}-{number}-{n}" for number in range(GROUPS) for n in range(2))


class Tenant:
    """A channel's trainer, which can be killed and started again."""

    def __init__(
        self,
        pool: TrainingPool,
        service: FakeTinker,
        engine: AdapterEngine,
        folder: Path,
        channel: str = "east",
        **settings: Any,
    ) -> None:
        self.pool, self.service, self.engine, self.folder, self.channel = pool, service, engine, folder, channel
        self.settings = TinkerSettings(channel=channel, groups=1, fetch_timeout=0.0, lease=60.0, **settings)
        self.updates: list[TinkerUpdate] = []

    def trainer(self) -> TinkerTrainer:
        sync = AdapterSync(
            self.pool, self.channel, self.folder / "adapters", engines=[self.engine.url], background=False, timeout=5.0
        )
        return TinkerTrainer(
            self.pool,
            self.service,
            sync,
            self.folder / self.channel,
            base_model="base",
            settings=self.settings,
            reports=[self.updates.append],
        )

    def in_last_state(self) -> Counter[str]:
        record = read_state(TinkerRecord, self.folder / self.channel / FILE)
        assert record is not None
        return Counter(self.service.states[record.state])


@pytest.fixture
def tenant(pool: TrainingPool, service: FakeTinker, engine: AdapterEngine, tmp_path: Path) -> Tenant:
    return Tenant(pool, service, engine, tmp_path)


def test_every_update_is_a_new_adapter_under_a_new_version(tenant: Tenant) -> None:
    tenant.trainer().run(GROUPS)
    assert [update.version for update in tenant.updates] == [2, 3, 4, 5], "1 is the adapter that was not trained yet"
    assert [update.tokens for update in tenant.updates] == [2, 2, 2, 2]
    policy = tenant.pool.channel_policy("east")
    assert policy.version == 5
    assert policy.adapter in tenant.engine.adapters
    assert tenant.in_last_state() == all_rows()
    assert tenant.pool.stats().channels["east"].held.steps == 0
    assert len(tenant.service.states) == 1, "older states are deleted at the service"


@pytest.mark.parametrize("is_skyrl", [False, True])
def test_adapters_are_fetched_by_the_paths_of_the_service_and_deleted_there(tenant: Tenant, is_skyrl: bool) -> None:
    tenant.service.is_skyrl = is_skyrl
    tenant.trainer().run(1)
    assert len(tenant.engine.adapters) == 2
    assert tenant.service.archives == {}


def test_a_batch_is_acknowledged_when_the_service_and_the_record_have_it(tenant: Tenant) -> None:
    tenant.settings = TinkerSettings(channel="east", groups=1, fetch_timeout=0.0, checkpoint_every=2)
    trainer = tenant.trainer()
    trainer.step()
    assert (len(tenant.pool.acknowledged), sum(tenant.in_last_state().values())) == (0, 0)
    trainer.step()
    assert (len(tenant.pool.acknowledged), sum(tenant.in_last_state().values())) == (2, 4)


@pytest.mark.parametrize("call", CALLS)
def test_an_answer_that_is_lost_leads_to_no_loss_and_no_repetition(tenant: Tenant, call: str) -> None:
    """The service has done what was asked, and nobody knows."""
    trainer = tenant.trainer()
    trainer.step()
    tenant.service.dies_at = call
    with pytest.raises(ConnectionError):
        trainer.step()
    trainer.run(GROUPS)
    assert tenant.in_last_state() == all_rows()
    assert tenant.pool.stats().channels["east"].held.steps == 0


@pytest.mark.parametrize("call", CALLS)
def test_a_run_that_is_killed_continues_without_loss_and_repetition(tenant: Tenant, call: str) -> None:
    killed = tenant.trainer()
    killed.step()
    before = tenant.pool.nack
    tenant.pool.nack = lambda leased: None  # type: ignore[method-assign]  # the dead return nothing
    tenant.service.dies_at = call
    with pytest.raises(ConnectionError):
        killed.step()
    tenant.pool.nack = before  # type: ignore[method-assign]
    tenant.pool.advance_to(1000.0)  # its leases expire
    tenant.trainer().run(GROUPS)
    assert tenant.in_last_state() == all_rows()
    assert tenant.pool.stats().channels["east"].held.steps == 0


def test_a_run_that_is_killed_before_its_acknowledgement_gives_it_later(tenant: Tenant) -> None:
    killed = tenant.trainer()
    killed.step()
    tenant.pool.dies_at_ack = True
    tenant.pool.nack = lambda leased: None  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        killed.step()
    tenant.pool.dies_at_ack = False
    resumed = tenant.trainer()
    resumed.start()
    assert tenant.pool.acknowledged == ["lease-1", "lease-2"]
    assert resumed.update == 2
    resumed.run(GROUPS)
    assert tenant.in_last_state() == all_rows()


def test_what_was_published_after_the_last_record_keeps_its_number_to_itself(tenant: Tenant) -> None:
    tenant.settings = TinkerSettings(channel="east", groups=1, fetch_timeout=0.0, lease=60.0, checkpoint_every=10)
    tenant.trainer().step()
    assert tenant.pool.channel_policy("east").version == 2
    resumed = tenant.trainer()
    resumed.start()
    assert (resumed.update, resumed.version) == (0, 3)


def test_two_channels_share_the_service_and_the_engine_and_no_data(
    tenant: Tenant, pool: TrainingPool, service: FakeTinker, engine: AdapterEngine, tmp_path: Path
) -> None:
    for number in range(GROUPS):
        add(pool, number, "west", rewards=(0.0, 1.0))
    west = Tenant(pool, service, engine, tmp_path, "west", loss="ppo")
    run_side_by_side([tenant.trainer(), west.trainer()], GROUPS)
    assert (tenant.in_last_state(), west.in_last_state()) == (all_rows("east"), all_rows("west"))
    assert [pool.channel_policy(channel).version for channel in ("east", "west")] == [5, 5]
    assert len({name.partition("-")[0] for name in engine.adapters}) == 2


def test_a_channel_that_fails_does_not_stop_the_other(
    tenant: Tenant, pool: TrainingPool, service: FakeTinker, engine: AdapterEngine, tmp_path: Path
) -> None:
    empty = Tenant(pool, service, engine, tmp_path, "west")
    with pytest.raises(ExceptionGroup) as failed:
        run_side_by_side([empty.trainer(), tenant.trainer()], GROUPS)
    assert [type(failure) for failure in failed.value.exceptions] == [FetchTimeout]
    assert tenant.in_last_state() == all_rows()


def test_engines_that_compute_with_other_weights_are_found_out(
    service: FakeTinker, engine: AdapterEngine, tmp_path: Path
) -> None:
    pool = TrainingPool()
    add(pool, 0, policy_version=0)
    add(pool, 1, policy_version=2)
    trainer = Tenant(pool, service, engine, tmp_path).trainer()
    service.off_by = 0.5
    assert trainer.step().logprob_gap is None, "of what an older adapter sampled, nothing can be said"
    with pytest.raises(SyncFailed, match="do not compute with adapter version 2"):
        trainer.step()
    assert len(service.clients[0].trained) == 2, "the optimizer did not step"


@pytest.mark.parametrize(
    ("loss", "config"),
    [
        ("importance_sampling", None),
        ("ppo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28}),
        ("cispo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28}),
    ],
)
def test_the_service_is_told_the_loss_and_the_optimizer(
    pool: TrainingPool, service: FakeTinker, engine: AdapterEngine, tmp_path: Path, loss: str, config: Any
) -> None:
    Tenant(pool, service, engine, tmp_path, loss=loss, learning_rate=0.5).trainer().step()
    assert service.clients[0].asked == [(loss, config), {"learning_rate": 0.5, "grad_clip_norm": 1.0}]


def test_batches_that_teach_nothing_are_acknowledged_and_end_the_run(
    service: FakeTinker, engine: AdapterEngine, tmp_path: Path
) -> None:
    pool = TrainingPool()
    for number in range(3):
        add(pool, number, rewards=(1.0, 1.0))
    tenant = Tenant(pool, service, engine, tmp_path, max_unlearnable=2)
    with pytest.raises(NothingLearned):
        tenant.trainer().run(3)
    assert pool.acknowledged == ["lease-1", "lease-2"]
    assert pool.channel_policy("east").version == 1, "the adapter has not changed"


def test_a_folder_of_another_run_is_refused(tenant: Tenant) -> None:
    tenant.trainer().run(1)
    (tenant.folder / "west").mkdir()
    (tenant.folder / "west" / FILE).write_bytes((tenant.folder / "east" / FILE).read_bytes())
    other = Tenant(tenant.pool, tenant.service, tenant.engine, tenant.folder, "west")
    with pytest.raises(BadRequest, match="has a run of channel 'east'"):
        other.trainer().start()
    (tenant.folder / "east" / FILE).write_text("{}")
    with pytest.raises(BadRequest, match="is not the record of a run"):
        tenant.trainer().start()


def test_the_channel_that_is_trained_is_the_one_that_is_served(tenant: Tenant) -> None:
    sync = AdapterSync(tenant.pool, "west", tenant.folder, background=False)
    with pytest.raises(BadRequest, match="'east' is trained, and 'west' would be served"):
        TinkerTrainer(
            tenant.pool, tenant.service, sync, tenant.folder, base_model="b", settings=TinkerSettings(channel="east")
        )
