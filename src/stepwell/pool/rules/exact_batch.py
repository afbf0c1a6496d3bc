"""Which groups form a batch of an exact number of trajectories.

- The sizes of the chosen groups sum exactly to the requested number, or nothing is chosen.
- Of all such sets the oldest is chosen: it contains the oldest group if any does, then the next oldest, and so on.
- An exact sum comes before shares, shares come before age.
- With a largest share per user, the oldest groups of each user are considered, as many as that share holds, at least
  one. An exact sum that needs more of one user is not found.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import TypeAlias

from stepwell.pool.api.leasing import GroupOffer, max_per_user

Sums: TypeAlias = int
"""A set of numbers as bits: it contains n if bit n is set."""
ZERO: Sums = 1
"""The sum of no groups: the set of 0."""


def choose_groups(
    offers: Sequence[GroupOffer],
    trajectories: int,
    shares: Mapping[str, float],
    max_share_per_user: float | None = None,
) -> list[GroupOffer] | None:
    """Whole groups with exactly that many trajectories, oldest first; None if there is no such set.

    Each source in `shares` gets at least its share of the batch, as far as its offers and an exact sum allow it. The
    first sources come first. Shares that sum to more than 1 are scaled down.
    """
    oldest = sorted(offers, key=lambda offer: (offer.opened_at, offer.age, offer.seq, offer.shard))
    if max_share_per_user is not None:
        oldest = _within_user_share(oldest, max_per_user(max_share_per_user, trajectories))
    unit = gcd(*(offer.size for offer in oldest))  # most sizes are equal: counted in units, the sets are small
    if unit == 0 or trajectories % unit or sum(offer.size for offer in oldest) < trajectories:
        return None  # a set of sums takes as many bits as the batch is large, however few the offers are
    batch = ExactBatch(oldest, unit, trajectories // unit)
    chosen = batch.choose({})
    if chosen is None:
        return None
    minimums = _minimums(shares, trajectories, unit)
    if all(batch.size_of(chosen, source) >= least for source, least in minimums.items()):
        return chosen
    return batch.choose(batch.reachable(minimums))


@dataclass(slots=True, eq=False)
class SourcePile:
    """The offers of one source, or of all sources without a minimum, during one pass from the oldest on."""

    sums_from: list[Sums]
    """The sums of the offers from the first on, from the second on, …, and last of none."""
    least: int = 0
    """The least that must still be taken."""
    place: int = 0
    """How many offers the pass has seen."""

    def remaining(self) -> Sums:
        """The sums that can still be taken."""
        return self.sums_from[self.place] >> self.least << self.least


@dataclass(frozen=True, slots=True)
class ExactBatch:
    """All offers, oldest first. All sizes except those of the offers are in units."""

    offers: Sequence[GroupOffer]
    unit: int
    total: int
    """The requested sum."""

    def choose(self, minimums: Mapping[str, int]) -> list[GroupOffer] | None:
        """The oldest offers that sum to the total and meet the minimums; None if there are none."""
        piles, others = self._piles(minimums)
        if not _can_sum_to(self.total, [*piles.values(), others]):
            return None
        chosen: list[GroupOffer] = []
        left = self.total
        refused: set[tuple[SourcePile, int]] = set()
        for offer in self.offers:
            pile, size = piles.get(offer.source, others), offer.size // self.unit
            pile.place += 1
            if (pile, size) in refused:  # an equal one did not fit, and none was chosen since
                continue
            least, pile.least = pile.least, max(0, pile.least - size)
            if _can_sum_to(left - size, [*piles.values(), others]):
                chosen.append(offer)
                left -= size
                refused.clear()
            else:
                pile.least = least
                refused.add((pile, size))
        return chosen

    def reachable(self, minimums: Mapping[str, int]) -> dict[str, int]:
        """The minimums, each lowered to the most that an exact sum allows if those before it are met."""
        kept: dict[str, int] = {}
        for source, least in minimums.items():
            piles, others = self._piles({**kept, source: 0})
            own = piles.pop(source).remaining()
            rest = _add_all([*piles.values(), others], self.total)
            most = max(n for n in range(self.total + 1) if own >> n & 1 and rest >> (self.total - n) & 1)
            kept[source] = min(least, most)
        return kept

    def size_of(self, chosen: Iterable[GroupOffer], source: str) -> int:
        return sum(offer.size for offer in chosen if offer.source == source) // self.unit

    def _piles(self, minimums: Mapping[str, int]) -> tuple[dict[str, SourcePile], SourcePile]:
        """One for each source with a minimum, and one for the others."""
        own: dict[str, list[int]] = {source: [] for source in minimums}
        others: list[int] = []
        for offer in self.offers:
            own.get(offer.source, others).append(offer.size // self.unit)
        piles = {source: SourcePile(_sums_from(sizes, self.total), minimums[source]) for source, sizes in own.items()}
        return piles, SourcePile(_sums_from(others, self.total))


def _within_user_share(oldest: Iterable[GroupOffer], most: int) -> list[GroupOffer]:
    """The first group of each user, and more as long as they have at most so many trajectories together."""
    taken: Counter[str] = Counter()
    kept: list[GroupOffer] = []
    for offer in oldest:
        if offer.user and taken[offer.user] and taken[offer.user] + offer.size > most:
            continue
        taken[offer.user] += offer.size
        kept.append(offer)
    return kept


def _minimums(shares: Mapping[str, float], trajectories: int, unit: int) -> dict[str, int]:
    """The least that each source gets, in units."""
    scale = max(1.0, sum(shares.values()))
    return {source: -(-int(share / scale * trajectories) // unit) for source, share in shares.items()}


def _sums_from(sizes: Sequence[int], most: int) -> list[Sums]:
    """The sums of the sizes from each one on, up to `most`."""
    sums_from, kept = [ZERO], (2 << most) - 1
    for size in reversed(sizes):
        sums_from.append((sums_from[-1] | sums_from[-1] << size) & kept)
    return sums_from[::-1]


def _can_sum_to(total: int, piles: Sequence[SourcePile]) -> bool:
    return total >= 0 and bool(_add_all(piles, total) >> total & 1)


def _add_all(piles: Iterable[SourcePile], most: int) -> Sums:
    """The sums of all piles together, up to `most`."""
    sums = ZERO
    for pile in piles:
        sums = _add(sums, pile.remaining(), most)
    return sums


def _add(a: Sums, b: Sums, most: int) -> Sums:
    """Every sum of a number of `a` and a number of `b`, up to `most`."""
    few, many = sorted((a, b), key=int.bit_count)
    sums = 0
    while few:
        sums |= many << (few & -few).bit_length() - 1
        few &= few - 1
    return sums & ((2 << most) - 1)
