"""Scored groups as Atropos' environments send them: JSON is read into arrays.

Invariants:
- A group has at least one sequence, and a sequence at least one token. Ids fit int32. Every number is finite.
- Fields that have no array are kept as they were sent, under their wire name, and are sent out again.

Long lists of numbers are checked by struct.pack, which accepts only numbers and is much faster than a validator.
"""

import re
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray

from stepwell.common.user_input import MOST_CONTAINERS, check_containers
from stepwell.errors import BadRequest
from stepwell.steps.layout import IndexArray, offsets
from stepwell.steps.step import BoolArray, Exactness, FloatArray, IntArray, Json, JsonObject

T = TypeVar("T")

UNTRAINED = -100
"""The mask of a token that is not trained; a trained token's mask repeats its id."""
FILLER = 1.0
"""The log-probability of a token that no policy wrote."""
OF_SEQUENCES = (
    *("advantages", "ref_logprobs", "messages", "overrides", "distill_token_ids", "distill_logprobs"),
    *("temperatures", "untrainable", "models"),
)
"""Optional fields with one entry per sequence. The last three say how it was sampled."""
OF_GROUPS = ("generation_params", "group_overrides", "images")
"""Optional fields of the group as a whole."""
NO_NUMBER = re.compile(rb"NaN|Infinity|nan|inf")
BYTES_A_CONTAINER = 16
"""A large body may have a list for so many bytes: its lists take no more memory than its numbers then. Distillation
sends a list for each token."""
LARGEST_VERSION = 2**63 - 1
TOO_DEEP = "nested too deeply"
"""orjson reads deeper nesting than it writes."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ScoredGroup:
    """N sequences that were scored together. Arrays over tokens have one sequence after the other."""

    tokens: IntArray
    trained: BoolArray
    logprobs: FloatArray | None
    """One per token; NaN for all tokens of a sequence that has none."""
    lengths_N: IndexArray
    scores_N: NDArray[np.float64]
    """NaN without a score. Environments send every score; rollouts that agents recorded may lack a reward."""
    policy_versions: Sequence[int | None]
    """The oldest version of each sequence; None if its sender does not know it."""
    exactness: Sequence[Exactness]
    extras_N: Sequence[JsonObject]
    """Further fields of each sequence, by wire name."""
    extras: JsonObject
    """Further fields of the group, by wire name."""
    env_id: int | None

    def __len__(self) -> int:
        return len(self.lengths_N)


def groups_from_json(body: bytes, kind: Literal["group", "list"]) -> list[ScoredGroup]:
    """The groups of a POST's body. BadRequest says what is wrong with it."""
    check_containers(body, max(MOST_CONTAINERS, len(body) // BYTES_A_CONTAINER))
    try:
        sent = orjson.loads(body)
    except orjson.JSONDecodeError as failure:
        more = "; NaN and Infinity are not allowed" if NO_NUMBER.search(body) else ""
        raise BadRequest(f"the body is not JSON: {failure}{more}") from None
    if kind == "group":
        return [group_from_json(sent)]
    if not isinstance(sent, list):
        raise BadRequest("the body must be a list of groups")
    return [group_from_json(group) for group in sent]


def group_from_json(sent: object) -> ScoredGroup:
    """A group from its wire fields. tokens, masks and scores are required."""
    if not isinstance(sent, dict):
        raise BadRequest("a scored group must be an object with tokens, masks and scores")
    tokens, lengths = _numbers("tokens", sent.get("tokens"), "i", None)
    require_ids(tokens, lengths)
    masks, _ = _numbers("masks", sent.get("masks"), "i", lengths)
    trained = masks != UNTRAINED
    extras_N, extras = _extras(sent, len(lengths))
    require_writable([extras, *extras_N])
    _keep_unusual_masks(extras_N, masks, np.where(trained, tokens, UNTRAINED), lengths)
    return ScoredGroup(
        tokens=tokens,
        trained=trained,
        logprobs=_logprobs(sent.get("inference_logprobs"), lengths, extras),
        lengths_N=lengths,
        scores_N=_scores(sent.get("scores"), len(lengths)),
        policy_versions=_each("policy_versions", sent.get("policy_versions"), len(lengths), _version, None),
        exactness=_each("exactness", sent.get("exactness"), len(lengths), read_grade, Exactness.SUBMITTED),
        extras_N=extras_N,
        extras=extras,
        env_id=read_env_id(sent.get("env_id")),
    )


def require_ids(tokens: IntArray, lengths: NDArray[np.integer[Any]]) -> None:
    if not lengths.all():
        raise BadRequest(f"tokens[{int(lengths.argmin())}]: a sequence has no tokens")
    if tokens.min() < 0:
        raise BadRequest("tokens: an id is negative")


def require_finite(field: str, numbers: NDArray[np.floating[Any]]) -> None:
    if not np.isfinite(numbers).all():
        raise BadRequest(f"{field}: {numbers[~np.isfinite(numbers)][0]} is not a finite number")


def require_writable(extras: Sequence[JsonObject]) -> None:
    """Refuses what cannot be sent out again: it would hold up every batch that it is part of."""
    try:
        orjson.dumps([extras])  # the digest of a group nests them as deep
    except orjson.JSONEncodeError:
        raise BadRequest(f"a further field is {TOO_DEEP}") from None


def with_missing_logprobs(given: FloatArray, has_N: BoolArray, lengths_N: NDArray[np.integer[Any]]) -> FloatArray:
    """One log-probability per token, from those of the sequences that have them; NaN for the others."""
    if has_N.all():
        return given
    logprobs = np.full(int(lengths_N.sum()), np.nan, np.float32)
    logprobs[np.repeat(has_N, lengths_N)] = given
    return logprobs


def _numbers(
    field: str, rows: object, code: Literal["i", "f"], lengths: IndexArray | None
) -> tuple[NDArray[Any], IndexArray]:
    """All numbers of a field, and how many each sequence has. With `lengths`, each must have as many as tokens."""
    if not isinstance(rows, list) or not rows:
        raise BadRequest(f"{field}: must be a list with a list of numbers for each of at least one sequence")
    if lengths is not None and len(rows) != len(lengths):
        raise BadRequest(f"{field}: {len(rows)} sequences, but tokens has {len(lengths)}")
    numbers = b"".join([_packed(f"{field}[{place}]", row, code) for place, row in enumerate(rows)])
    own = np.fromiter(map(len, rows), np.int64, len(rows))
    if lengths is not None and not np.array_equal(own, lengths):
        place = int((own != lengths).argmax())
        raise BadRequest(f"{field}[{place}]: {own[place]} entries for {lengths[place]} tokens")
    return np.frombuffer(numbers, np.int32 if code == "i" else np.float32), own


def _packed(where: str, row: object, code: Literal["i", "f"]) -> bytes:
    if not isinstance(row, list):
        raise BadRequest(f"{where}: must be a list of numbers, not {_shown(row)}")
    try:
        return struct.pack(f"{len(row)}{code}", *row)
    except struct.error:
        raise BadRequest(f"{where}: {_wrong(row, code)}") from None


def _wrong(row: list[object], code: Literal["i", "f"]) -> str:
    number_type, name = (Integral, "an integer") if code == "i" else (Real, "a number")
    wrong = next((place for place, value in enumerate(row) if not isinstance(value, number_type)), None)
    return "a number is too large" if wrong is None else f"entry {wrong} is {_shown(row[wrong])}, not {name}"


def _shown(value: object) -> str:
    try:
        text = orjson.dumps(value).decode()
    except orjson.JSONEncodeError:
        return TOO_DEEP
    return text if len(text) <= 40 else f"{text[:40]}…"


def _logprobs(rows: object, lengths: IndexArray, extras: dict[str, Json]) -> FloatArray | None:
    """One per token, or None. An empty list means that the sequence has none."""
    if rows is None:
        return None
    field = "inference_logprobs"
    if not isinstance(rows, list) or len(rows) != len(lengths):
        raise BadRequest(f"{field}: must be null, or a list for each of the {len(lengths)} sequences")
    has = np.array([row != [] for row in rows])
    if not has.any():
        extras[field] = rows
        return None
    given, _ = _numbers(field, [row for row in rows if row != []], "f", lengths[has])
    require_finite(field, given)
    return with_missing_logprobs(given, has, lengths)


def _scores(scores: object, count: int) -> NDArray[np.float64]:
    if not isinstance(scores, list) or len(scores) != count:
        raise BadRequest(f"scores: must be a list of {count} numbers, one per sequence")
    try:
        read = np.frombuffer(array("d", scores), np.float64)
    except (TypeError, OverflowError):
        place = next(i for i, score in enumerate(scores) if not isinstance(score, float | int))
        raise BadRequest(f"scores[{place}]: {_shown(scores[place])} is not a number") from None
    require_finite("scores", read)
    return read


def _extras(sent: Mapping[str, Json], count: int) -> tuple[list[dict[str, Json]], dict[str, Json]]:
    """Further fields of each sequence, if there is an entry for each, and of the group."""
    extras_N: list[dict[str, Json]] = [{} for _ in range(count)]
    extras = {field: sent[field] for field in OF_GROUPS if sent.get(field) is not None}
    for field in OF_SEQUENCES:
        entries = sent.get(field)
        if isinstance(entries, list) and len(entries) == count:
            for own, entry in zip(extras_N, entries, strict=True):
                own[field] = entry
        elif entries is not None:
            extras[field] = entries
    return extras_N, extras


def _keep_unusual_masks(extras_N: list[dict[str, Json]], masks: IntArray, usual: IntArray, lengths: IndexArray) -> None:
    if np.array_equal(masks, usual):
        return
    starts = offsets(lengths)
    for own, start, end in zip(extras_N, starts, starts[1:], strict=False):
        if not np.array_equal(masks[start:end], usual[start:end]):
            own["masks"] = masks[start:end].tolist()


def _each(field: str, values: object, count: int, read: Any, default: T) -> list[T]:
    if values is None:
        return [default] * count
    if not isinstance(values, list) or len(values) != count:
        raise BadRequest(f"{field}: must be a list of {count} entries, one per sequence")
    return [read(f"{field}[{place}]", value) for place, value in enumerate(values)]


def _version(where: str, value: object) -> int | None:
    if value is None or (type(value) is int and 0 <= value <= LARGEST_VERSION):
        return value
    raise BadRequest(f"{where}: {_shown(value)} is not a policy version")


def read_grade(where: str, value: object) -> Exactness:
    try:
        return Exactness(str(value))
    except ValueError:
        raise BadRequest(f"{where}: {_shown(value)} is none of {', '.join(Exactness)}") from None


def read_env_id(value: object) -> int | None:
    if value is None or type(value) is int:
        return value
    raise BadRequest(f"env_id: {_shown(value)} is not an integer")
