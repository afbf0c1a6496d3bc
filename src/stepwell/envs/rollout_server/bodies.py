"""A scored group as the body of a request: Arrow where both sides have it, else JSON, compressed from 1 KiB on."""

import gzip
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from stepwell.errors import BadRequest, RolloutServerRefused

COMPRESSED_FROM = 1_024
LEVEL = 1
"""Of gzip: most of the gain for a quarter of the time."""


@dataclass(frozen=True, slots=True)
class Packed:
    body: bytes
    headers: Mapping[str, str]


def can_pack_arrow() -> bool:
    return importlib.util.find_spec("pyarrow") is not None


def pack(group: Mapping[str, Any], *, arrow: bool) -> Packed:
    """RolloutServerRefused if no server could take it."""
    try:
        body = orjson.dumps(group, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as wrong:
        raise RolloutServerRefused(f"the group cannot be written as JSON: {wrong}") from wrong
    if arrow:
        return _packed_as_arrow(body)
    headers = {"Content-Type": "application/json"}
    if len(body) < COMPRESSED_FROM:
        return Packed(body, headers)
    return Packed(gzip.compress(body, LEVEL), {**headers, "Content-Encoding": "gzip"})


def _packed_as_arrow(body: bytes) -> Packed:
    from stepwell.wire.scored_groups import groups_from_json
    from stepwell.wire.scored_groups_arrow import groups_to_arrow

    try:
        packed = groups_to_arrow(groups_from_json(body, "group"))
    except BadRequest as wrong:
        raise RolloutServerRefused(f"the group is not what rollout servers take: {wrong}") from wrong
    return Packed(packed, {"Content-Type": "application/vnd.apache.arrow.stream"})
