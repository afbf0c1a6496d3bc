"""docs/live.md: its trainer is run, over a pool in this process with live steps, and two engines that load what they
are given. The first version reaches both; a later one is given to the canary's engine."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rig.docs_pages import DOCS, blocks
from rig.waiting import wait_until
from tests.unit.trainers.models import one_turn
from tests.unit.trainers.scripted_engine import serve
from tests.unit.trainers.test_docs import LoadingEngine
from tests.unit.trainers.training_pool import TrainingPool

STEPS, UPDATES = 4, 2
OURS = {
    'connect("data_pool")': "the_tests_pool",
    "groups=64, updates=1000": f"groups={STEPS}, updates={UPDATES}",
}


@pytest.fixture
def engines() -> Iterator[list[LoadingEngine]]:
    with ExitStack() as stack:
        served = [LoadingEngine(), LoadingEngine()]
        for engine in served:
            stack.enter_context(serve(engine))
        yield served


def live_pool(engines: list[LoadingEngine]) -> TrainingPool:
    """With as many rewarded steps as the page trains."""
    pool = TrainingPool()
    pool._run(pool.local.change_engines(add=tuple(engine.url for engine in engines)))
    for number in range(STEPS * UPDATES):
        uid = f"session-{number}"
        step = one_turn(
            uid, uid, [1, 2, number], [3, 4 + number % 2], reward=float(number % 2), reward_source="next_state"
        )
        pool.add_group(uid, [([step], None)])
    return pool


def test_the_page_trains_on_steps_and_gives_a_new_version_to_a_canary(
    engines: list[LoadingEngine], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = [found for found in blocks(DOCS / "live.md", "python") if "GuardedSync" in found.code]
    program = block.code
    for theirs, own in {**OURS, 'Path("model")': f"Path({str(tiny_model)!r})"}.items():
        assert theirs in program
        program = program.replace(theirs, own)
    monkeypatch.chdir(tmp_path)
    pool = live_pool(engines)
    scope: dict[str, Any] = {"the_tests_pool": pool}
    exec(program, scope)
    try:
        assert scope["trainer"].update == UPDATES
        wait_until(lambda: pool.canary() is not None, "a canary")
        canary = pool.canary()
        assert canary is not None
        assert canary.engines == (engines[-1].url,)
        assert canary.share == pytest.approx(0.1)
        assert [decision.action for decision in pool.decisions()][:2] == ["promote", "canary"]
    finally:
        scope["guard"].close()
