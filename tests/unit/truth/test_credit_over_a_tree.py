"""The steps of a trajectory form a tree, and `credit` says what each of them counts. However the trajectory is cut
into rows, each sampled token is trained once, with the same credit.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stepwell.trainers.trl_groups import PolicyVersions

from stepwell.errors import BadRequest
from stepwell.pool.client.batch import Batch, make_batch
from stepwell.steps.columns import pack
from stepwell.steps.credit import CreditKind, count_leaves
from stepwell.steps.step import FloatArray, Step, mask_array
from stepwell.trainers.rows import choose_rows
from stepwell.trainers.settings import RowSettings, Settings
from stepwell.trainers.trainer import AsyncTrainer
from stepwell.trainers.trl import samples_of
from stepwell.trainers.verl import verl_rows
from tests.unit.trainers.models import Recurrent, one_turn
from tests.unit.trainers.training_pool import TrainingPool

KINDS: tuple[CreditKind, ...] = ("root", "leaf", "split")
LONGEST = 128
Call = tuple[tuple[int, ...], tuple[int, ...]]
"""A prompt and a response."""


@st.composite
def trees(draw: st.DrawFn) -> list[Call]:
    """Each call continues an earlier one, or none. Few different tokens, so that calls also agree by accident."""
    tokens = st.integers(1, 2)
    calls: list[Call] = []
    for number in range(draw(st.integers(1, 8))):
        continued = draw(st.integers(-1, number - 1))
        before = () if continued < 0 else (*calls[continued][0], *calls[continued][1])
        said = draw(st.lists(tokens, min_size=not before, max_size=2))
        calls.append(((*before, *said), tuple(draw(st.lists(tokens, min_size=1, max_size=2)))))
    return calls


def rollout(uid: str, calls: Sequence[Call]) -> list[Step]:
    """One step a call."""
    return [
        replace(one_turn(uid, "p", prompt, response, step_index=n), uid=f"{uid}-{n}")
        for n, (prompt, response) in enumerate(calls)
    ]


def batch_of(calls: Sequence[Call]) -> Batch:
    """A rollout with these calls that did well, and one that did not."""
    pool = TrainingPool()
    pool.add_group("p", [(rollout("tree", calls), 1.0), (rollout("other", [((1,), (1,))]), 0.0)])
    return pool.fetch_batch(1)


def leaves_below(calls: Sequence[Call]) -> list[Fraction]:
    """The definition, call by call and without a prefix tree: every leaf counts for all that it continues."""
    ends = [prompt + response for prompt, response in calls]
    continued = [max((end for end in ends if prompt[: len(end)] == end), key=len, default=None) for prompt, _ in calls]
    below = [Fraction(0)] * len(calls)

    def count(number: int, part: Fraction) -> None:
        below[number] += part
        before = [n for n, end in enumerate(ends) if end == continued[number]]
        for earlier in before:
            count(earlier, part / len(before))

    for number, end in enumerate(ends):
        if end not in continued:
            count(number, Fraction(1))
    return below


def credits_of(batch: Batch, kind: CreditKind) -> Counter[float]:
    """Of the tree's trained tokens in merged rows."""
    rows = choose_rows(batch, (), RowSettings(credit=kind))
    tree = rows.uids_T.index("tree")
    is_tree = np.repeat(rows.merged.trajectory_of_R == tree, np.diff(rows.merged.offsets_R))
    return counted(rows.advantages[is_tree & rows.trained])


def credits_in_verl(batch: Batch, kind: CreditKind, *, merged: bool) -> Counter[float]:
    rows = verl_rows(
        batch,
        RowSettings(credit=kind),
        prompt_length=LONGEST,
        response_length=LONGEST,
        pad_id=0,
        merged=merged,
        overlong="raise",
    )
    is_tree = (rows.labels["trajectory_uid"] == "tree")[:, None]
    return counted(rows.tensors["advantages"][is_tree & (rows.tensors["response_mask"] == 1)])


def counted(advantages: FloatArray) -> Counter[float]:
    return Counter(advantages.astype(np.float64).round(4).tolist())


@given(trees())
def test_leaves_are_counted_as_the_definition_says(calls: list[Call]) -> None:
    steps = rollout("tree", calls)
    leaves = count_leaves(pack(steps), np.zeros(len(steps), np.int64))
    expected = leaves_below(calls)
    np.testing.assert_allclose(leaves.below_S, [float(below) for below in expected])
    roots = [all(prompt[: len(p + r)] != p + r for p, r in calls) for prompt, _ in calls]
    assert leaves.below_S[roots].sum() == pytest.approx(leaves.is_leaf_S.sum())


@settings(max_examples=30)
@given(trees(), st.sampled_from(KINDS), st.randoms(use_true_random=False))
def test_the_credit_of_every_sampled_token_is_the_same_however_the_tree_is_cut(
    calls: list[Call], kind: CreditKind, random: Random
) -> None:
    batch = batch_of(calls)
    merged = credits_of(batch, kind)
    assert merged.total() == sum(len(response) for _, response in calls)
    assert credits_in_verl(batch, kind, merged=False) == merged
    assert credits_in_verl(batch, kind, merged=True) == merged
    assert credits_of(make_batch(pack(batch.steps()), [len(batch.columns)]), kind) == merged
    shuffled = random.sample(calls, len(calls))
    assert credits_of(batch_of(shuffled), kind) == merged


FORKED: list[Call] = [((1,), (2,)), ((1, 2, 3), (4,)), ((1, 2, 5), (6,)), ((9,), (8,))]
"""A turn that two others continue, and a sub-agent with a context of its own: three leaves."""


@pytest.mark.parametrize(
    ("kind", "shares"), [("root", [1, 1, 1, 1]), ("leaf", [2, 1, 1, 1]), ("split", [2 / 3, 1 / 3, 1 / 3, 1 / 3])]
)
def test_a_shared_turn_counts_once_or_for_each_leaf_or_for_the_share_of_leaves(
    kind: CreditKind, shares: list[float]
) -> None:
    rows = choose_rows(batch_of(FORKED), (), RowSettings(credit=kind))
    tokens = rows.merged.tokens[rows.trained].tolist()
    advantages = dict(zip(tokens, rows.advantages[rows.trained].tolist(), strict=True))
    of_one = 0.5**0.5
    assert [advantages[token] / of_one for token in (2, 4, 6, 8)] == pytest.approx(shares, abs=1e-3)


def test_root_is_the_default_and_gives_all_tokens_the_advantage_of_the_rollout() -> None:
    assert credits_of(batch_of(FORKED), Settings().credit) == credits_of(batch_of(FORKED), "root")
    assert len(credits_of(batch_of(FORKED), "root")) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_turns_in_one_step_with_a_mask_have_the_credit_of_separate_steps(kind: CreditKind) -> None:
    apart = [*rollout("tree", FORKED[:1]), *rollout("tree", [((1, 2, 3), (4,))]), *rollout("tree", FORKED[3:])]
    joined = replace(
        one_turn("tree", "p", (1,), (2, 3, 4)), response_mask=mask_array([True, False, True]), step_index=0
    )
    cut = [[replace(step, step_index=n, uid=str(n)) for n, step in enumerate(apart)], [joined, apart[-1]]]
    batches = [make_batch(pack([*steps, *rollout("other", FORKED[:1])]), [len(steps) + 1]) for steps in cut]
    of_step = [np.array([1.0] + [np.nan] * (len(steps) - 1) + [0.0]) for steps in cut]
    scored = [
        replace(batch, columns=replace(batch.columns, rewards_S=rewards))
        for batch, rewards in zip(batches, of_step, strict=True)
    ]
    assert credits_of(scored[0], kind) == credits_of(scored[1], kind)


def test_trl_gets_a_sample_for_each_share_of_a_row() -> None:
    samples = samples_of(choose_rows(batch_of(FORKED), (), RowSettings(credit="leaf")), 0, PolicyVersions())
    of_tree = sorted((round(s.advantage, 2), s.input_ids[s.completion_mask == 1].tolist()) for s in samples)
    assert of_tree == [(-0.71, [1]), (0.71, [4]), (0.71, [6]), (0.71, [8]), (1.41, [2])]


def test_a_trainer_learns_otherwise_if_branches_count_otherwise() -> None:
    def norm(kind: CreditKind) -> float:
        pool = TrainingPool()
        pool.add_group("p", [(rollout("tree", FORKED), 1.0), (rollout("other", [((1,), (1,))]), 0.0)])
        return AsyncTrainer(pool, Recurrent(), settings=Settings(groups=1, credit=kind)).step().gradient_norm

    assert len({norm(kind) for kind in KINDS}) == len(KINDS)


def test_another_kind_of_credit_is_refused() -> None:
    with pytest.raises(BadRequest, match="credit is one of root, leaf, split, not 'leaves'"):
        choose_rows(batch_of(FORKED), (), RowSettings(credit="leaves"))  # type: ignore[arg-type]
