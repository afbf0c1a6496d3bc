"""A scored group as a request body: Arrow if both sides support it, else JSON, compressed from 1 KiB on."""

import gzip
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from stepwell.errors import BadRequest, RolloutServerRefused

COMPRESSED_FROM = 1_024
GZIP_LEVEL = 1
"""Saves most of the bytes in a quarter of the time."""


@dataclass(frozen=True, slots=True)
class PackedGroup:
    body: bytes
    headers: Mapping[str, str]


def can_pack_arrow() -> bool:
    return importlib.util.find_spec("pyarrow") is not None


def pack_group(group: Mapping[str, Any], *, arrow: bool) -> PackedGroup:
    """RolloutServerRefused if no server could accept it."""
    try:
        body = orjson.dumps(group, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as failure:
        raise RolloutServerRefused(f"the group cannot be written as JSON: {failure}") from failure
    if arrow:
        return _pack_arrow(body)
    headers = {"Content-Type": "application/json"}
    if len(body) < COMPRESSED_FROM:
        return PackedGroup(body, headers)
    return PackedGroup(gzip.compress(body, GZIP_LEVEL), {**headers, "Content-Encoding": "gzip"})


def _pack_arrow(body: bytes) -> PackedGroup:
    from stepwell.wire.scored_groups import groups_from_json
    from stepwell.wire.scored_groups_arrow import groups_to_arrow

    try:
        packed = groups_to_arrow(groups_from_json(body, "group"))
    except BadRequest as failure:
        raise RolloutServerRefused(f"rollout servers do not accept this group: {failure}") from failure
    return PackedGroup(packed, {"Content-Type": "application/vnd.apache.arrow.stream"})
