"""Exact sums, oldest first, shares: against every set there is, where there are few."""

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.pool.api.leasing import GroupOffer
from stepwell.pool.rules.exact_batch import choose_groups

SOURCES = ("a", "b", "c")


def offers_of(*sizes_and_sources: tuple[int, str]) -> list[GroupOffer]:
    """Oldest first."""
    return [GroupOffer("shard", n, n, float(n), size, source) for n, (size, source) in enumerate(sizes_and_sources)]


def all_of(count: int, size: int, source: str, since: float = 0.0) -> list[GroupOffer]:
    return [GroupOffer("shard", n, n, since + n, size, source) for n in range(count)]


def places(chosen: Sequence[GroupOffer] | None) -> list[int] | None:
    return None if chosen is None else [offer.seq for offer in chosen]


def size_of(chosen: Sequence[GroupOffer], source: str | None = None) -> int:
    return sum(offer.size for offer in chosen if source in (None, offer.source))


def exact_sets(offers: Sequence[GroupOffer], total: int) -> Iterator[list[GroupOffer]]:
    """Every set with that sum, the oldest first."""
    for taken in product((True, False), repeat=len(offers)):
        found = [offer for offer, is_taken in zip(offers, taken, strict=True) if is_taken]
        if size_of(found) == total:
            yield found


def expected(offers: Sequence[GroupOffer], total: int, shares: Mapping[str, float]) -> list[GroupOffer] | None:
    """Each share in its turn as far as the sets allow it that are left, then the oldest of these."""
    sets = list(exact_sets(offers, total))
    scale = max(1.0, sum(shares.values()))
    for source, share in shares.items():
        least = min(int(share / scale * total), max((size_of(found, source) for found in sets), default=0))
        sets = [found for found in sets if size_of(found, source) >= least]
    return sets[0] if sets else None


@settings(max_examples=400, deadline=None)
@given(
    groups=st.lists(st.tuples(st.integers(1, 6), st.sampled_from(SOURCES)), max_size=9),
    total=st.integers(1, 16),
    shares=st.dictionaries(st.sampled_from((*SOURCES, "silent")), st.floats(0, 1.2)),
)
def test_what_is_chosen_is_the_oldest_exact_set_that_keeps_the_shares_as_far_as_any_does(
    groups: list[tuple[int, str]], total: int, shares: dict[str, float]
) -> None:
    offers = offers_of(*groups)
    assert choose_groups(offers, total, shares) == expected(offers, total, shares)


def test_a_group_that_does_not_fit_is_passed_over_and_nothing_else_is() -> None:
    assert places(choose_groups(offers_of((3, "a"), (2, "a"), (2, "a"), (2, "a")), 4, {})) == [1, 2]
    assert places(choose_groups(offers_of((3, "a"), (2, "a"), (2, "a"), (1, "a")), 4, {})) == [0, 3]


def test_there_is_no_batch_without_an_exact_sum() -> None:
    assert choose_groups(offers_of((3, "a"), (3, "a")), 4, {}) is None
    assert choose_groups(offers_of((2, "a"), (2, "a")), 5, {}) is None
    assert choose_groups(offers_of((2, "a")), 4, {}) is None
    assert choose_groups([], 4, {}) is None


def test_a_batch_that_is_far_too_large_takes_no_memory() -> None:
    assert choose_groups(offers_of((2, "a"), (3, "b")), 2**62, {"a": 0.5}) is None


def test_a_younger_source_gets_its_share_of_a_queue_of_older_ones() -> None:
    offers = all_of(32, 8, "old") + all_of(32, 8, "young", since=100)
    chosen = choose_groups(offers, 64, {"young": 0.25})
    assert chosen is not None
    assert (size_of(chosen, "old"), size_of(chosen, "young")) == (48, 16)
    assert [offer.opened_at for offer in chosen] == [0, 1, 2, 3, 4, 5, 100, 101]


def test_a_source_with_nothing_or_little_on_offer_holds_no_one_up() -> None:
    offers = all_of(8, 8, "old") + all_of(1, 8, "young", since=100)
    chosen = choose_groups(offers, 64, {"silent": 0.5, "young": 0.5})
    assert chosen is not None
    assert size_of(chosen, "young") == 8


def test_shares_that_cannot_all_be_had_are_scaled_down() -> None:
    offers = all_of(16, 4, "a") + all_of(16, 4, "b", since=100)
    chosen = choose_groups(offers, 64, {"a": 1.5, "b": 0.5})
    assert chosen is not None
    assert (size_of(chosen, "a"), size_of(chosen, "b")) == (48, 16)


def test_a_share_gives_way_to_an_exact_sum_and_takes_no_other_with_it() -> None:
    offers = [*all_of(8, 4, "old"), GroupOffer("shard", 90, 90, 90.0, 3, "odd"), *all_of(8, 4, "young", since=100)]
    chosen = choose_groups(offers, 16, {"odd": 0.2, "young": 0.5})
    assert chosen is not None
    assert [size_of(chosen, source) for source in ("old", "odd", "young")] == [8, 0, 8]


def test_age_counts_over_all_shards() -> None:
    offers = [GroupOffer("x", 1, 1, 5.0, 1, ""), GroupOffer("y", 7, 7, 4.0, 1, ""), GroupOffer("x", 2, 2, 6.0, 1, "")]
    assert [(offer.shard, offer.seq) for offer in choose_groups(offers, 2, {}) or []] == [("y", 7), ("x", 1)]


@pytest.mark.parametrize("sizes", [(8,), (3, 5, 7, 8)])
def test_a_large_batch_from_many_sources_with_shares_is_quickly_chosen(sizes: tuple[int, ...]) -> None:
    offers = [
        GroupOffer("shard", n, n, n + 1000.0 * source, size, str(source))
        for source in range(4)
        for size in sizes
        for n in range(1024 // size)
    ]
    began = time.process_time()
    chosen = choose_groups(offers, 1024, {"1": 0.2, "2": 0.2, "3": 0.1})
    assert time.process_time() - began < 1.0
    assert chosen is not None
    assert size_of(chosen) == 1024
    assert [size_of(chosen, str(source)) >= least for source, least in ((1, 204), (2, 204), (3, 102))] == [True] * 3
