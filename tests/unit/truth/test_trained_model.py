"""T11: steps of another model or adapter than the one that is trained are left out of batches and counted."""

from pathlib import Path

from rig.builders import EasyPool, make_step
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.producing import Registration
from stepwell.pool.api.staleness import Present
from stepwell.pool.api.watching import TrajectoryState, why_not_trained
from tests.unit.pool.shard.journals import kill, open_pool, save


def with_models(pool: EasyPool, *models: str) -> EasyPool:
    pool.register(Registration("t", "p"))
    pool.submit([make_step(uid=model or "?", model=model, started_at=n) for n, model in enumerate(models)])
    pool.complete("t", "p", 1.0)
    return pool


def taken(pool: EasyPool) -> list[str]:
    return [step.uid for group in pool.take(1) or [] for step in group]


def left_out(pool: EasyPool) -> dict[str, int]:
    return {kind: count.steps for kind, count in pool.stats().channels["train"].left_out.items()}


def test_steps_of_another_model_are_left_out_and_counted() -> None:
    pool = with_models(EasyPool(Limits(trained_models=("lora-7", "tiny"))), "tiny", "other", "lora-7", "")
    assert taken(pool) == ["tiny", "lora-7", "?"], "a step whose model is not known is taken"
    assert left_out(pool) == {"model": 1}


def test_without_a_setting_every_model_is_trained() -> None:
    assert taken(with_models(EasyPool(Limits()), "tiny", "other")) == ["tiny", "other"]


def test_an_exact_batch_leaves_them_out_too() -> None:
    pool = EasyPool(Limits(trained_models=("tiny",)))
    pool.send_group("a", 2, model="other")
    pool.send_group("b", 2, model="tiny")
    filled = pool.fill(2)
    assert filled is not None
    assert set(filled[1].columns.prompt_uids) == {"b"}
    assert left_out(pool) == {"model": 2}


def test_a_trajectory_that_another_model_wrote_says_so() -> None:
    pool = with_models(EasyPool(Limits(trained_models=("tiny",))), "other")
    assert taken(pool) == []
    (snapshot,) = pool.view.page(0, 10).snapshots
    assert snapshot.state is TrajectoryState.TRAINED
    assert why_not_trained(snapshot, Limits(), Present(0, 0.0)) == (
        "The trainer left all of it out: another model or adapter wrote it than the one that is trained."
    )


def test_a_lease_keeps_its_models_over_a_restart(tmp_path: Path) -> None:
    limits = Limits(trained_models=("tiny",))
    pool, journal, _ = open_pool(tmp_path / "pool.sqlite", limits)
    with_models(pool, "tiny", "other")
    leased = pool.lease(1)
    assert leased is not None
    save(pool, journal)
    kill(journal)
    pool, _, report = open_pool(tmp_path / "pool.sqlite", limits)
    assert not report.damaged
    pool.leasing.ack(leased[0])
    assert left_out(pool) == {"model": 1}
