"""D2: the token store took one stack frame for each fork, so a long session of a template that drops its thinking ended
in a RecursionError."""

from pathlib import Path

import numpy as np

from rig.builders import make_step
from stepwell.pool.api.producing import Registration
from stepwell.pool.client.batch import batch_of, make_batch
from stepwell.steps.columns import pack
from stepwell.steps.step import Step
from tests.unit.pool.shard.journals import kill, open_pool, save

TURNS = 5_000


def forking_session(turns: int) -> list[Step]:
    """The thinking of a turn is not in the prompt of the next one."""
    random = np.random.default_rng(0)
    conversation, steps = random.integers(0, 1000, 20), []
    for turn in range(turns):
        thinking, answer, question = random.integers(0, 1000, (3, 2))
        response = np.concatenate([thinking, answer])
        steps.append(make_step(uid=str(turn), started_at=turn, prompt_ids=conversation, response_ids=response))
        conversation = np.concatenate([conversation, answer, question])
    return steps


def test_five_thousand_forks_are_stored_shipped_and_restored(tmp_path: Path) -> None:
    steps = forking_session(TURNS)
    pool, journal, _ = open_pool(tmp_path / "journal.db")
    pool.register(Registration("t", "p"))
    for start in range(0, TURNS, 100):
        pool.submit(steps[start : start + 100])
    pool.complete("t", "p", 1.0)
    save(pool, journal)
    kill(journal)
    pool, journal, _ = open_pool(tmp_path / "journal.db")
    leased = pool.lease(1)
    assert leased is not None
    shipped = batch_of(leased[1]).columns
    journal.close()
    assert len(shipped) == TURNS
    assert len(shipped.added) < 5 * 4 * TURNS, "what turns share is shipped once"
    for turn in (0, 1, TURNS // 2, TURNS - 1):
        start, end = shipped.token_offsets_S[turn : turn + 2]
        expected = np.concatenate([steps[turn].prompt_ids, steps[turn].response_ids])
        np.testing.assert_array_equal(shipped.tokens[start:end], expected)


def test_the_rows_of_a_thousand_forks_are_as_many() -> None:
    pool_of_one = forking_session(1_000)

    merged = make_batch(pack(pool_of_one), [1_000]).merged()
    assert len(merged) == 1_000
    assert merged.forks.total() == 999
