"""Which groups make a batch of exactly so many trajectories.

What always holds: the sizes of what is chosen sum exactly to what is asked for, or nothing is chosen. Of all such sets
it is the oldest: the oldest group is in it if it can be, then the next oldest, and so on. Shares come before age, an
exact sum before shares.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import TypeAlias

from stepwell.pool.api.leasing import GroupOffer

Sums: TypeAlias = int
"""A set of numbers, as bits: n is in it if bit n is set."""
ZERO: Sums = 1
"""What nothing at all sums up to."""


def choose_groups(
    offers: Sequence[GroupOffer], trajectories: int, shares: Mapping[str, float]
) -> list[GroupOffer] | None:
    """Whole groups with exactly that many trajectories, oldest first; None if there is no such set of them.

    Each source in `shares` gets at least its part of the batch, as far as it has something on offer and an exact sum
    allows it; those named first are seen to first. Shares that sum to more than 1 are scaled down.
    """
    unit = gcd(*(offer.size for offer in offers))  # sizes are mostly alike: counted in units, the sets are small
    if unit == 0 or trajectories % unit:
        return None
    oldest = sorted(offers, key=lambda offer: (offer.opened_at, offer.age, offer.seq, offer.shard))
    stock = ExactBatch(oldest, unit, trajectories // unit)
    chosen = stock.choose({})
    if chosen is None:
        return None
    minimums = _minimums(shares, trajectories, unit)
    if all(stock.size_of(chosen, source) >= least for source, least in minimums.items()):
        return chosen
    return stock.choose(stock.possible(minimums))


@dataclass(slots=True, eq=False)
class SourcePile:
    """The offers of one source, or of all that have no minimum, as they are gone through from the oldest on."""

    reach: list[Sums]
    """What can be made of the offers from the first, the second, … on, and, last, of none."""
    least: int = 0
    """How much must still be taken."""
    place: int = 0
    """How many were gone through."""

    def sums(self) -> Sums:
        """What can still be taken."""
        return self.reach[self.place] >> self.least << self.least


@dataclass(frozen=True, slots=True)
class ExactBatch:
    """All that is on offer, oldest first. All sizes but the offers' own are in units."""

    offers: Sequence[GroupOffer]
    unit: int
    total: int
    """What is asked for."""

    def choose(self, minimums: Mapping[str, int]) -> list[GroupOffer] | None:
        """The oldest offers that sum to the total and keep the minimums; None if there are none."""
        piles, others = self._piles(minimums)
        if not _can_make(self.total, [*piles.values(), others]):
            return None
        chosen: list[GroupOffer] = []
        left = self.total
        refused: set[tuple[SourcePile, int]] = set()
        for offer in self.offers:
            pile, size = piles.get(offer.source, others), offer.size // self.unit
            pile.place += 1
            if (pile, size) in refused:  # another like it did not fit in, and nothing was taken since
                continue
            least, pile.least = pile.least, max(0, pile.least - size)
            if _can_make(left - size, [*piles.values(), others]):
                chosen.append(offer)
                left -= size
                refused.clear()
            else:
                pile.least = least
                refused.add((pile, size))
        return chosen

    def possible(self, minimums: Mapping[str, int]) -> dict[str, int]:
        """The minimums, each lowered to the most that an exact sum allows if those before it are kept."""
        kept: dict[str, int] = {}
        for source, least in minimums.items():
            piles, others = self._piles({**kept, source: 0})
            own = piles.pop(source).sums()
            rest = _plus_all([*piles.values(), others], self.total)
            most = max(n for n in range(self.total + 1) if own >> n & 1 and rest >> (self.total - n) & 1)
            kept[source] = min(least, most)
        return kept

    def size_of(self, chosen: Iterable[GroupOffer], source: str) -> int:
        return sum(offer.size for offer in chosen if offer.source == source) // self.unit

    def _piles(self, minimums: Mapping[str, int]) -> tuple[dict[str, SourcePile], SourcePile]:
        """One for each source that has a minimum, and one for the others."""
        own: dict[str, list[int]] = {source: [] for source in minimums}
        others: list[int] = []
        for offer in self.offers:
            own.get(offer.source, others).append(offer.size // self.unit)
        piles = {source: SourcePile(_reach(sizes, self.total), minimums[source]) for source, sizes in own.items()}
        return piles, SourcePile(_reach(others, self.total))


def _minimums(shares: Mapping[str, float], trajectories: int, unit: int) -> dict[str, int]:
    """What each source is to get at least, in units."""
    scale = max(1.0, sum(shares.values()))
    return {source: -(-int(share / scale * trajectories) // unit) for source, share in shares.items()}


def _reach(sizes: Sequence[int], most: int) -> list[Sums]:
    """What can be made of the sizes from each on, up to `most`."""
    reach, kept = [ZERO], (2 << most) - 1
    for size in reversed(sizes):
        reach.append((reach[-1] | reach[-1] << size) & kept)
    return reach[::-1]


def _can_make(total: int, piles: Sequence[SourcePile]) -> bool:
    return total >= 0 and bool(_plus_all(piles, total) >> total & 1)


def _plus_all(piles: Iterable[SourcePile], most: int) -> Sums:
    """What can be made of all of them together, up to `most`."""
    made = ZERO
    for pile in piles:
        made = _plus(made, pile.sums(), most)
    return made


def _plus(a: Sums, b: Sums, most: int) -> Sums:
    """Every sum of a number of the one and a number of the other, up to `most`."""
    few, many = sorted((a, b), key=int.bit_count)
    made = 0
    while few:
        made |= many << (few & -few).bit_length() - 1
        few &= few - 1
    return made & ((2 << most) - 1)
