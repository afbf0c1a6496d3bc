"""Batches with a prefix tree: what is shipped of it, and that nobody who reads a batch can tell the difference."""

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rig.builders import EasyPool, make_step, same_step
from stepwell.pool.api.leasing import Unit
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.producing import Registration
from stepwell.pool.client.batch import Batch, batch_of, make_batch
from stepwell.steps.columns import NO_BASE, Columns, cut, stack, unpack
from stepwell.steps.step import Exactness, Step, ids_array
from tests.unit.steps.test_rows import trajectories


def fetched(steps: list[Step], count: int = 1, **how: Any) -> Batch:
    pool = EasyPool(Limits())
    for uid in dict.fromkeys(step.trajectory_uid for step in steps):
        pool.register(Registration(uid, "p", "train", len({step.trajectory_uid for step in steps})))
    pool.submit(steps)
    for uid in dict.fromkeys(step.trajectory_uid for step in steps):
        pool.complete(uid, "p")
    leased = pool.lease(count, **how)
    assert leased is not None
    return batch_of(leased[1])


def conversation(turns: int = 4, **fields: Any) -> list[Step]:
    """Each turn has 10 tokens: 8 of context and 2 that the model wrote."""
    return [
        make_step(
            uid=f"turn-{turn}",
            step_index=turn,
            prompt_ids=range(10 * turn + 8),
            response_ids=range(10 * turn + 8, 10 * turn + 10),
            **fields,
        )
        for turn in range(turns)
    ]


def bases(columns: Columns) -> list[tuple[int, int]]:
    assert columns.bases is not None
    return list(zip(columns.bases.base_S.tolist(), columns.bases.shared_S.tolist(), strict=True))


def test_a_step_ships_only_what_it_adds() -> None:
    columns = fetched(conversation()).columns
    assert bases(columns) == [(NO_BASE, 0), (0, 10), (1, 20), (2, 30)]
    assert columns.added.tolist() == list(range(40))
    assert [step.prompt_ids.tolist() for step in unpack(columns, copy=False)] == [
        list(range(10 * turn + 8)) for turn in range(4)
    ]


def test_a_step_whose_base_is_left_out_extends_the_one_before_that() -> None:
    steps = conversation()
    steps[1] = make_step(
        uid="turn-1",
        step_index=1,
        prompt_ids=range(18),
        response_ids=[18, 19],
        untrainable="greedy: temperature is 0",
    )
    columns = fetched(steps).columns
    assert columns.uids == ["turn-0", "turn-2", "turn-3"]
    assert bases(columns) == [(NO_BASE, 0), (0, 10), (1, 30)]
    assert columns.added.tolist() == list(range(40))


def test_a_first_step_that_is_left_out_is_expanded_into_the_next() -> None:
    steps = conversation()
    steps[0] = make_step(
        uid="turn-0", step_index=0, prompt_ids=range(8), response_ids=[8, 9], exactness=Exactness.RETOKENIZED
    )
    columns = fetched(steps).columns
    assert bases(columns) == [(NO_BASE, 0), (0, 20), (1, 30)]
    assert columns.added.tolist() == list(range(40))


def test_single_steps_share_nothing() -> None:
    batch = fetched(conversation(), 4, unit=Unit.STEPS)
    assert bases(batch.columns) == [(NO_BASE, 0)] * 4
    assert len(batch.columns.added) == 10 + 20 + 30 + 40
    assert len(batch.merged()) == 4


def test_a_trajectory_that_is_divided_into_groups_is_merged_within_them() -> None:
    columns = fetched(conversation()).columns
    merged = make_batch(columns, [1, 3]).merged()
    assert [steps.tolist() for steps in merged.steps_of_R] == [[0], [1, 2, 3]]
    assert len(make_batch(columns, [1] * 4).merged()) == 4


def test_groups_of_history_ship_their_tree_too() -> None:
    pool = EasyPool(Limits(history_size=10))
    for prompt in ("old", "new"):
        pool.register(Registration(prompt, prompt))
        pool.submit(
            [make_step(prompt, prompt, uid=f"{prompt}-{n}", step_index=n, prompt_ids=range(1 + 3 * n)) for n in (0, 1)]
        )
        pool.complete(prompt, prompt)
        if prompt == "old":
            pool.take(1)
    leased = pool.lease(2, history=0.5)
    assert leased is not None
    batch = batch_of(leased[1])
    assert batch.from_history_G.tolist() == [False, True]
    assert [base for base, _ in bases(batch.columns)] == [NO_BASE, 0, NO_BASE, 2]


def test_pieces_of_a_batch_have_their_part_of_the_tree() -> None:
    columns = fetched([*conversation(), *conversation_of("u")]).columns
    first, second = cut(columns, [4, 4])
    assert bases(second) == [(NO_BASE, 0), (0, 10), (1, 20), (2, 30)]
    again = stack([second, first])
    assert bases(again) == [*bases(second), (NO_BASE, 0), (4, 10), (5, 20), (6, 30)]
    assert again.tokens.tolist() == [*second.tokens.tolist(), *first.tokens.tolist()]


def test_a_piece_that_is_cut_off_from_its_base_is_expanded() -> None:
    columns = fetched(conversation()).columns
    first, second = cut(columns, [2, 2])
    assert (first.bases, second.bases) == (None, None)
    assert second.tokens.tolist() == [*range(30), *range(40)]


def test_a_tree_and_steps_without_one_are_stacked_expanded() -> None:
    columns = fetched(conversation()).columns
    both = stack([columns, columns.expanded()])
    assert both.bases is None
    assert both.tokens.tolist() == [*columns.tokens.tolist()] * 2


def conversation_of(uid: str) -> list[Step]:
    return [make_step(uid, **fields_of(step)) for step in conversation()]


def fields_of(step: Step) -> dict[str, Any]:
    names = ("uid", "step_index", "prompt_ids", "response_ids")
    return {name: getattr(step, name) for name in names}


rollouts = st.tuples(trajectories("a"), trajectories("b"))


@given(rollouts, st.integers(0, 6))
def test_a_batch_with_a_tree_reads_like_one_without(rollouts: tuple[list[Step], list[Step]], left_out: int) -> None:
    steps = [step for rollout in rollouts for step in rollout]
    marked = [
        make_step(step.trajectory_uid, **fields_of(step), untrainable="side_call: one")
        if number == left_out and len(steps) > 1
        else make_step(step.trajectory_uid, **fields_of(step))
        for number, step in enumerate(steps)
    ]
    batch = fetched(marked)
    plain = replace(batch, columns=batch.columns.expanded())
    shipped = [step for step in marked if step.untrainable is None]
    assert [step.prompt_ids.tolist() for step in batch.steps()] == [step.prompt_ids.tolist() for step in shipped]
    assert all(same_step(a, b) for a, b in zip(batch.steps(), plain.steps(), strict=True))
    merged, searched = batch.merged(), plain.merged()
    for name in ("tokens", "loss_mask", "logprobs", "versions", "offsets_R", "row_of_S", "weights_R"):
        assert np.array_equal(getattr(merged, name), getattr(searched, name)), name
    assert merged.forks == searched.forks
    padded = batch.padded(40, 5)
    assert np.array_equal(padded.input_ids_S_T, plain.padded(40, 5).input_ids_S_T)


def test_a_rollout_that_forks_in_every_turn_is_shipped_and_merged() -> None:
    history, steps = np.empty(0, np.int32), []
    for turn in range(1_000):
        prompt = np.concatenate([history, [turn]]).astype(np.int32)
        steps.append(make_step(uid=f"{turn}", started_at=float(turn), prompt_ids=prompt, response_ids=[5_000, turn]))
        history = np.concatenate([prompt, [turn]]).astype(np.int32)
    batch = fetched(steps)
    assert len(batch.columns.added) < 5 * len(steps)
    merged = batch.merged()
    assert len(merged) == 1_000
    assert merged.tokens[merged.offsets_R[-2] :].tolist() == [*steps[-1].prompt_ids, *ids_array([5_000, 999])]
