"""Steps as lines of JSON: the same columns as in Parquet, for tools that read text.

What always holds: a line read back is the step that was written, bit for bit: log-probabilities are written with all
the digits they need. Metadata, sampling and extras are JSON within a text, here as there, for their keys differ from
step to step and readers of tables want one schema.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np
import orjson

from stepwell.errors import BadRequest
from stepwell.steps.columns import Columns, pack, unpack
from stepwell.steps.groups import StepGroup
from stepwell.steps.step import Exactness, JsonObject, Step, VersionSpan, ids_array, logprobs_array, mask_array

SCHEMA_KEY = "stepwell_schema"
Record: TypeAlias = Mapping[str, Any]
"""A line as it stands in the file: this is the door."""
PLAIN = (
    "prompt_uid",
    "trajectory_uid",
    "uid",
    "step_index",
    "policy_version",
    "is_last",
    "reward",
    "reward_source",
    "reward_revision",
    "finish_reason",
    "started_at",
    "quarantine",
    "untrainable",
)
"""Fields of a step that JSON has as they are."""


def line_of(record: Record) -> bytes:
    return orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)


def step_records(schema: int, group: StepGroup, number: int) -> Iterator[Record]:
    of_group = {SCHEMA_KEY: schema, "group": number, "source": group.source, "channel": group.channel}
    for step in unpack(group.columns, copy=False):
        logprobs = step.response_logprobs
        yield {
            **of_group,
            **{name: getattr(step, name) for name in PLAIN},
            "exactness": str(step.exactness),
            "prompt_ids": step.prompt_ids,
            "response_ids": step.response_ids,
            "response_logprobs": None if logprobs is None else logprobs.astype(np.float64),
            "response_mask": step.response_mask,
            "version_spans": [span._asdict() for span in step.version_spans],
            "metadata": json.dumps(dict(sorted(step.metadata.items()))),
            "sampling": json.dumps(dict(step.sampling)),
            "extras": json.dumps(dict(step.extras)),
        }


def groups_of_lines(lines: Iterable[bytes], readable: int, name: str) -> Iterator[StepGroup]:
    """Those of a file of that name. A group ends where its number or its prompt_uid changes."""
    records = (_record(line, n, readable, name) for n, line in enumerate(lines, 1) if line.strip())
    for _, run in groupby(records, key=lambda numbered: (numbered[1].get("group"), numbered[1].get("prompt_uid"))):
        found = list(run)
        first = found[0][1]
        steps = [_step(record, f"{name}, line {n}") for n, record in found]
        yield StepGroup(_packed(steps, name), str(first.get("source", "")), str(first.get("channel", "")))


def _record(line: bytes, number: int, readable: int, name: str) -> tuple[int, Record]:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as failure:
        raise BadRequest(f"{name}, line {number} is no JSON: {failure}") from None
    schema = record.get(SCHEMA_KEY) if isinstance(record, dict) else None
    if not isinstance(schema, int):
        raise BadRequest(f"{name}, line {number} has no {SCHEMA_KEY}: only --shape steps can be read back")
    if schema > readable:
        raise BadRequest(
            f"{name} has schema version {schema}, this Stepwell reads up to {readable}: install a newer one"
        )
    return number, record


def _step(record: Record, where: str) -> Step:
    try:
        logprobs, mask = record["response_logprobs"], record["response_mask"]
        return Step(
            **{name: record[name] for name in PLAIN},
            exactness=Exactness(record["exactness"]),
            prompt_ids=ids_array(record["prompt_ids"]),
            response_ids=ids_array(record["response_ids"]),
            response_logprobs=None if logprobs is None else logprobs_array(logprobs),
            response_mask=None if mask is None else mask_array(mask),
            version_spans=tuple(VersionSpan(**span) for span in record["version_spans"]),
            metadata=_object(record["metadata"]),
            sampling=_object(record["sampling"]),
            extras=_object(record["extras"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as failure:
        raise BadRequest(f"{where} is no step: {failure!r}") from None


def _packed(steps: list[Step], name: str) -> Columns:
    try:
        return pack(steps)
    except (TypeError, ValueError, OverflowError) as failure:
        raise BadRequest(f"{name} has something other than a number where one belongs: {failure}") from None


def _object(text: str) -> JsonObject:
    found: JsonObject = json.loads(text)
    return found
