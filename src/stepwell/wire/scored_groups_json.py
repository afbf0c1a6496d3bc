"""Scored groups as Atropos' trainers get them: 14 keys, and the policy versions.

A batch is written piece by piece, each at most a sequence long, so that its sender can do other things in between.
Log-probabilities are written as the float32 they are kept as: what was sent, but for the rounding to it.
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
    *("distill_logprobs", "policy_versions"),
)
NO_EXAMPLE: dict[str, list[object]] = {
    field: []
    for field in ORDER
    if field not in ("overrides", "group_overrides", "env_id", "distill_token_ids", "distill_logprobs")
}
"""What is shown where no group has come yet."""


def batch_parts(groups: Iterable[ScoredGroup]) -> Iterator[bytes]:
    """The answer to GET /batch."""
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
        return _listed(_written(group.tokens[start:end]) for start, end in _places(group))
    if field == "masks":
        return _listed(_written(mask) for mask in _masks(group))
    if field == "inference_logprobs" and group.logprobs is not None:
        return _listed(_logprobs(group, start, end) for start, end in _places(group))
    return _small(group, field)


def _small(group: ScoredGroup, field: str) -> Iterator[bytes]:
    if field == "scores":
        yield _written(group.scores_N)
    elif field == "env_id":
        yield _written(group.env_id)
    elif field == "policy_versions":
        yield _written(list(group.policy_versions))
    elif field in OF_SEQUENCES and any(field in own for own in group.extras_N):
        yield from _listed(_written(own.get(field)) for own in group.extras_N)
    else:
        yield _written(group.extras.get(field))


def _listed(parts: Iterable[bytes]) -> Iterator[bytes]:
    opening = b"["
    for part in parts:
        yield opening
        yield part
        opening = b","
    yield b"]"


def _places(group: ScoredGroup) -> Iterable[tuple[int, int]]:
    return pairwise(offsets(group.lengths_N).tolist())


def _masks(group: ScoredGroup) -> Iterator[IntArray]:
    for (start, end), own in zip(_places(group), group.extras_N, strict=True):
        sent = own.get("masks")
        labels = group.tokens[start:end] if sent is None else np.array(sent, np.int32)
        yield np.where(group.trained[start:end], labels, np.int32(UNTRAINED))


def _logprobs(group: ScoredGroup, start: int, end: int) -> bytes:
    assert group.logprobs is not None
    own = group.logprobs[start:end]
    return b"[]" if np.isnan(own[0]) else _written(own)


def _written(value: object) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
