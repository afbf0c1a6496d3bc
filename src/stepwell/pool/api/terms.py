"""What a fetch may ask for, in the plain words of whoever calls, and how that becomes a Wanted."""

from typing import Any, TypedDict, Unpack

from stepwell.errors import BadRequest
from stepwell.pool.api.leasing import Order, Unit, Wanted
from stepwell.pool.rules.ingest import TRAIN
from stepwell.steps.step import Exactness

ENUMS = {"unit": Unit, "order": Order, "min_exactness": Exactness}


class Terms(TypedDict, total=False):
    """The keywords of every `fetch_batch`. What is not given is as in `Wanted`."""

    channel: str
    """`train` unless told otherwise."""
    unit: str
    """`groups`, `trajectories` or `steps`."""
    order: str
    """`oldest_ready` or `strict`."""
    history: float
    """The share drawn from what was trained before."""
    min_exactness: str
    """`engine`, `submitted` or `retokenized`: steps of a lower grade are left out."""
    untrainable: bool
    """Also the steps marked untrainable."""


def make_wanted(count: int, **terms: Unpack[Terms]) -> Wanted:
    given: dict[str, Any] = {"channel": TRAIN, **terms}
    try:
        wanted = Wanted(count=count, **given | {name: ENUMS[name](given[name]) for name in ENUMS.keys() & given})
    except ValueError as failure:
        raise BadRequest(str(failure)) from None
    if count < 1:
        raise BadRequest(f"a batch has at least one of its {wanted.unit}, not {count}")
    if not 0.0 <= wanted.history <= 1.0:
        raise BadRequest(f"history is a share of the batch, from 0 to 1, not {wanted.history}")
    return wanted
