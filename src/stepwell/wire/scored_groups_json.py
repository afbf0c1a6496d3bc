"""Scored groups as JSON for Atropos' trainers: 14 keys, the policy versions and the temperatures.

A batch is written in parts of at most one sequence, so that other tasks can run in between. Log-probabilities are
written as float32, as they are stored.
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise

import numpy as np
import orjson

from stepwell.steps.layout import offsets
from stepwell.steps.step import IntArray
from stepwell.wire.scored_groups import OF_SEQUENCES, UNTRAINED, ScoredGroup

ORDER = (
    *("tokens", "masks", "scores", "advantages", "ref_logprobs", "messages", "generation_params"),
    *("inference_logprobs", "overrides", "group_overrides", "images", "env_id", "distill_token_ids"),
    *("distill_logprobs", "policy_versions", "temperatures"),
)
NO_EXAMPLE: dict[str, list[object]] = {
    field: []
    for field in ORDER
    if field not in ("overrides", "group_overrides", "env_id", "distill_token_ids", "distill_logprobs")
}
"""The answer to GET /latest_example before the first group."""


def batch_parts(groups: Iterable[ScoredGroup]) -> Iterator[bytes]:
    """The body of a response to GET /batch."""
    yield b'{"batch":['
    for place, group in enumerate(groups):
        if place:
            yield b","
        yield from group_parts(group)
    yield b"]}"


def group_parts(group: ScoredGroup) -> Iterator[bytes]:
    opening = b"{"
    for field in ORDER:
        yield opening + orjson.dumps(field) + b":"
        yield from _field(group, field)
        opening = b","
    yield b"}"


def _field(group: ScoredGroup, field: str) -> Iterator[bytes]:
    if field == "tokens":
        return _json_list(_dump(group.tokens[start:end]) for start, end in _spans(group))
    if field == "masks":
        return _json_list(_dump(mask) for mask in _masks(group))
    if field == "inference_logprobs" and group.logprobs is not None:
        return _json_list(_logprobs(group, start, end) for start, end in _spans(group))
    if field in OF_SEQUENCES and any(field in own for own in group.extras_N):
        return _json_list(_dump(own.get(field)) for own in group.extras_N)
    small = {"scores": group.scores_N, "env_id": group.env_id, "policy_versions": list(group.policy_versions)}
    return iter([_dump(small[field] if field in small else group.extras.get(field))])


def _json_list(parts: Iterable[bytes]) -> Iterator[bytes]:
    opening = b"["
    for part in parts:
        yield opening
        yield part
        opening = b","
    yield b"]"


def _spans(group: ScoredGroup) -> Iterable[tuple[int, int]]:
    return pairwise(offsets(group.lengths_N).tolist())


def _masks(group: ScoredGroup) -> Iterator[IntArray]:
    for (start, end), own in zip(_spans(group), group.extras_N, strict=True):
        sent = own.get("masks")
        labels = group.tokens[start:end] if sent is None else np.array(sent, np.int32)
        yield np.where(group.trained[start:end], labels, np.int32(UNTRAINED))


def _logprobs(group: ScoredGroup, start: int, end: int) -> bytes:
    assert group.logprobs is not None
    own = group.logprobs[start:end]
    return b"[]" if np.isnan(own[0]) else _dump(own)


def _dump(value: object) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
