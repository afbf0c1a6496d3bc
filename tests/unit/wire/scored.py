"""Scored groups for tests, as an environment would send them, and what must come out again."""

from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
from hypothesis import strategies as st

from stepwell.wire.scored_groups import ScoredGroup, group_parts

KEYS = {
    *("tokens", "masks", "scores", "advantages", "ref_logprobs", "messages", "generation_params", "images", "env_id"),
    *("inference_logprobs", "overrides", "group_overrides", "distill_token_ids", "distill_logprobs"),
}
"""Of a /batch item, as Atropos has them."""

finite = st.floats(allow_nan=False, allow_infinity=False)
logprob = st.floats(-50, 0, width=32) | st.just(1.0) | st.just(0.0)
text = st.text(st.characters(codec="utf-8"), max_size=5)
json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | finite | text,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(text, inner, max_size=2),
    max_leaves=4,
)
some_object = st.dictionaries(text, json, max_size=2)


@st.composite
def scored_groups(draw: st.DrawFn) -> dict[str, Any]:
    """Any group that is taken, in any corner: all trained, none, odd masks, single tokens, every field."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))

    def rows(values: st.SearchStrategy[Any]) -> list[list[Any]]:
        return [draw(st.lists(values, min_size=n, max_size=n)) for n in lengths]

    def entries(value: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(value, min_size=len(lengths), max_size=len(lengths)))

    tokens = rows(st.integers(0, 2**31 - 1))
    masks = [[draw(st.sampled_from((-100, token))) for token in row] for row in tokens]
    if draw(st.booleans()):
        masks = rows(st.integers(-100, 3))
    optional: dict[str, Callable[[], Any]] = {
        "advantages": lambda: rows(finite),
        "ref_logprobs": lambda: rows(finite),
        "messages": lambda: entries(st.lists(some_object, max_size=2)),
        "generation_params": lambda: draw(some_object),
        "inference_logprobs": lambda: [row if draw(st.integers(0, 3)) else [] for row in rows(logprob)],
        "overrides": lambda: entries(some_object),
        "group_overrides": lambda: draw(some_object),
        "images": lambda: draw(json),
        "env_id": lambda: draw(st.integers(0, 9)),
        "distill_token_ids": lambda: rows(st.lists(st.integers(0, 99), max_size=2)),
        "distill_logprobs": lambda: rows(st.lists(finite, max_size=2)),
        "policy_versions": lambda: entries(st.none() | st.integers(0, 2**60)),
        "exactness": lambda: entries(st.sampled_from(("engine", "submitted", "retokenized"))),
    }
    group: dict[str, Any] = {"tokens": tokens, "masks": masks, "scores": entries(finite)}
    chosen = [name for name in optional if draw(st.booleans())]
    return group | {name: optional[name]() for name in chosen}


def expected(sent: dict[str, Any], *, policy_version: int | None = None) -> dict[str, Any]:
    """The /batch item of a group: all keys, and the policy version that counts where none was sent.

    Log-probabilities are compared as what they are kept as.
    """
    item = {key: sent.get(key) for key in KEYS}
    item["inference_logprobs"] = as_float32(item["inference_logprobs"])
    item["policy_versions"] = [
        policy_version if version is None else version
        for version in sent.get("policy_versions", [None] * len(sent["tokens"]))
    ]
    item["temperatures"] = sent.get("temperatures")
    return item


def written(group: ScoredGroup) -> dict[str, Any]:
    item: dict[str, Any] = orjson.loads(b"".join(group_parts(group)))
    item["inference_logprobs"] = as_float32(item["inference_logprobs"])
    return item


def as_float32(rows: list[list[float]] | None) -> list[list[float]] | None:
    return None if rows is None else [np.array(row, np.float32).tolist() for row in rows]
