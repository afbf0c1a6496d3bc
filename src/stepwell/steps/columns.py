# ruff: noqa: N802 - arrays carry their shape in the name, properties too
"""Many steps as a few flat arrays: the form in which steps travel between processes and lie in spool files.

A message of packed steps costs little more than its bytes; a list of Python integers takes ten times as much.

- `unpack(pack(steps))` and `from_bytes(to_bytes(steps))` give the same steps in the same order.
- The arrays can lie in shared memory. They are read without a copy and are never written.
- Columns may carry a prefix tree. Then a step has only the tokens that it adds to those of an earlier step, and the
  whole prompts are put together when `tokens` is first read.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, chain, pairwise
from operator import attrgetter
from types import NoneType
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from stepwell.common.message_format import FORMAT, OWN_FORMS, OwnForm, incompatible, message, sent
from stepwell.steps.layout import IndexArray, offsets, sums
from stepwell.steps.sent_columns import (
    DTYPES,
    KINDS,
    LAYOUT,
    LISTS,
    SHORT,
    SPAN,
    TEXTS,
    check_arrays,
    checked_shared,
    exact_json,
    joined_texts,
    read_json,
    read_short,
    read_spans,
    read_stored,
    read_texts,
    stored_values,
)
from stepwell.steps.step import (
    CARRIED,
    REQUIRED,
    SCALAR_COLUMNS,
    BoolArray,
    Column,
    Exactness,
    FloatArray,
    IntArray,
    JsonObject,
    Step,
    Storage,
    VersionSpan,
)
from stepwell.steps.trainable import read_temperature

D = TypeVar("D", bound=np.generic)

GRADE_OF = {grade.value: grade for grade in Exactness}
NO_BASE = -1


@message
class PrefixLinks(NamedTuple):
    """The prefix tree of a batch: which earlier step each step begins with."""

    base_S: IntArray
    """The row of the earlier step; NO_BASE if there is none."""
    shared_S: IntArray
    """How many tokens the step has in common with it, counted from the first."""


@sent
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Columns:
    """S steps, column by column."""

    added: IntArray
    """The tokens of each step that its base does not have, step after step; all tokens if there are no `bases`."""
    logprobs: FloatArray
    """One for each response token; NaN in all places of a step that has none."""
    mask: BoolArray
    """One for each response token: is it trained?"""
    prompt_lengths_S: IntArray
    response_lengths_S: IntArray
    rewards_S: NDArray[np.float64]
    """NaN if no one has scored the step."""
    returns_S: NDArray[np.float64]
    """The return of each step's trajectory; NaN if it is not known."""
    outcomes_S: NDArray[np.float64]
    """The outcome reward of each step's trajectory; NaN if there is none."""
    reward_revisions_S: IntArray
    step_indexes_S: IntArray
    policy_versions_S: NDArray[np.int64]
    is_last_S: BoolArray
    started_at_S: NDArray[np.float64]
    trajectory_uids: list[str]
    prompt_uids: list[str]
    uids: list[str]
    reward_sources: list[str]
    rewards_of: list[str]
    """OF_STEP or OF_TRAJECTORY; empty without a reward, and in older files."""
    metadata: list[JsonObject]
    version_spans: list[tuple[VersionSpan, ...]]
    exactness: list[Exactness]
    quarantine: list[str | None]
    untrainable: list[str | None]
    models: list[str]
    carried: Mapping[str, Any]
    """All other columns, by their packed name: arrays and lists."""
    bases: PrefixLinks | None = None
    """The prefix tree, where it is known."""
    sent_at: float | None = None
    """The sender's clock when the steps left, in wall-clock seconds: their ages are told by one clock."""
    _expanded: IntArray | None = field(default=None, init=False, repr=False)

    def __len__(self) -> int:
        return len(self.uids)

    @property
    def tokens(self) -> IntArray:
        """The prompt, then the response of each step, step after step."""
        if self.bases is None:
            return self.added
        if self._expanded is None:
            object.__setattr__(self, "_expanded", _expand(self, self.bases))
        assert self._expanded is not None
        return self._expanded

    @property
    def sampling(self) -> list[JsonObject]:
        sampling: list[JsonObject] = self.carried["sampling"]
        return sampling

    @property
    def temperatures_S(self) -> NDArray[np.float64]:
        """NaN if it is not known. Steps of older versions have it in `sampling`."""
        told_S: NDArray[np.float64] = self.carried["temperatures_S"]
        unknown_S = np.isnan(told_S)
        if not unknown_S.any():
            return told_S
        return np.where(unknown_S, np.array([read_temperature(None, of) for of in self.sampling], np.float64), told_S)

    @property
    def extras(self) -> list[JsonObject]:
        extras: list[JsonObject] = self.carried["extras"]
        return extras

    @property
    def lengths_S(self) -> IndexArray:
        """How many tokens each step has, prompt and response."""
        return self.prompt_lengths_S.astype(np.int64) + self.response_lengths_S

    @property
    def token_offsets_S(self) -> IndexArray:
        """Step i is `tokens[offsets[i]:offsets[i + 1]]`."""
        return offsets(self.lengths_S)

    @property
    def has_logprobs_S(self) -> BoolArray:
        """Which steps have a log-probability for every token of their response."""
        missing_S = sums(np.isnan(self.logprobs), self.response_lengths_S)
        complete_S: BoolArray = (missing_S == 0) & (self.response_lengths_S > 0)
        return complete_S

    def expanded(self) -> "Columns":
        """The same steps without a prefix tree."""
        return self if self.bases is None else replace(self, added=self.tokens, bases=None)

    def __reduce__(self) -> tuple[Callable[..., "Columns"], tuple[int, dict[str, Any]]]:
        return restore_columns, (FORMAT, sent_values(self))


STATE = tuple(attribute.name for attribute in fields(Columns) if attribute.name != "_expanded")
FLAT = ("added", "logprobs", "mask")
PER_STEP = tuple(name for name in STATE if name not in (*FLAT, "carried", "bases", "sent_at"))
NAMES = tuple(column.name for column in SCALAR_COLUMNS)
SCALARS = attrgetter(*NAMES)
UNPACKED = ("prompt_ids", "response_ids", "response_logprobs", "response_mask", *NAMES)
PACKING = tuple((column.packed, DTYPES.get(column.kind)) for column in SCALAR_COLUMNS)
CARRIED_NAMES = tuple(column.packed for column in CARRIED)


def make_columns(count: int, values: Mapping[str, Any]) -> Columns:
    """Columns of so many steps from values by their packed names. A column without values has its default."""
    scalars = {name: values[name] for name, _ in PACKING if name in values}
    if len(scalars) < len(PACKING):
        lacking = [c for c in SCALAR_COLUMNS if c.packed not in values and c.default is not REQUIRED]
        scalars |= {column.packed: pack_values(column, [column.default] * count) for column in lacking}
    return Columns(
        added=values["tokens"],
        logprobs=values["logprobs"],
        mask=values["mask"],
        prompt_lengths_S=values["prompt_lengths_S"],
        response_lengths_S=values["response_lengths_S"],
        carried={name: scalars.pop(name) for name in CARRIED_NAMES},
        bases=values.get("bases"),
        sent_at=values.get("sent_at"),
        **scalars,
    )


def sent_values(columns: Columns) -> dict[str, Any]:
    """The values by the columns' names, as in common/message_format.py."""
    values: dict[str, Any] = {name: getattr(columns, name) for name in PER_STEP}
    values |= {"tokens": columns.added, "logprobs": columns.logprobs, "mask": columns.mask, "bases": columns.bases}
    values["sent_at"] = columns.sent_at
    return values | dict(columns.carried)


def restore_columns(sent_format: int, values: Mapping[str, Any]) -> Columns:
    """Called by pickle. It stays in this module under this name: that is part of the format."""
    if sent_format > FORMAT:
        raise incompatible("Columns", sent_format)
    return make_columns(len(values["uids"]), values)


def to_message(columns: Columns) -> dict[str, Any]:
    """A message with all texts in one JSON text, all objects in another, and the short arrays end to end: most messages
    have few steps, and an array by itself costs more than its bytes."""
    values = sent_values(columns)
    values["exactness"] = [grade.value for grade in columns.exactness]
    with suppress(TypeError):
        values |= joined_texts({name: values[name] for name in TEXTS}, len(columns))
    lists = {name: values.pop(name) for name in LISTS}
    if "texts" in values:
        lists = {name: of_steps for name, of_steps in lists.items() if name not in TEXTS}
    spans = values.pop("version_spans")
    values["span_counts_S"] = np.array([len(of_step) for of_step in spans], np.int32)
    values["spans"] = np.fromiter(chain.from_iterable(chain.from_iterable(spans)), SPAN).tobytes()
    if all(values[name].dtype == dtype for name, dtype in SHORT):
        values["short"] = b"".join([values.pop(name).tobytes() for name, _ in SHORT])
        values["layout"] = LAYOUT
    return values | {"count": len(columns), "lists": exact_json(lists)}


def from_message(values: dict[str, Any]) -> Columns:
    """Reads columns of another process, which may send anything. ValueError, KeyError or TypeError if they do not fit
    together."""
    count, lists = values["count"], read_json(values["lists"])
    if type(values.get("bases")) not in (PrefixLinks, NoneType) or type(values.get("sent_at")) not in (float, NoneType):
        raise TypeError("bases, sent_at")
    if type(count) is not int or count < 0:
        raise TypeError("count")
    if "short" in values:
        values = values | read_short(values["short"], values["layout"], count)
    else:
        check_arrays(values, [(name, KINDS[dtype.kind]) for name, dtype in SHORT], count)
    for name, column in lists.items():
        if name in LISTS and (len(column) != count or not LISTS[name].issuperset(map(type, column))):
            raise TypeError(name)
    values = values | lists
    if "texts" in values:
        values |= read_texts(values["texts"], values["text_names"].split(","), count)
    values["exactness"] = [GRADE_OF[grade] for grade in values["exactness"]]
    values["version_spans"] = read_spans(values["span_counts_S"].tolist(), values["spans"])
    columns = make_columns(count, values)
    prompts, responses = columns.prompt_lengths_S.tolist(), columns.response_lengths_S.tolist()
    if min(prompts, default=0) < 0 or min(responses, default=0) < 0:
        raise ValueError("lengths")
    shared = 0 if columns.bases is None else checked_shared(*columns.bases, columns.lengths_S)
    check_arrays(values, [("tokens", "iu")], sum(prompts) + sum(responses) - shared)
    check_arrays(values, [("logprobs", "f"), ("mask", "b")], sum(responses))
    return columns


OWN_FORMS[Columns] = OwnForm(to_message, from_message)


def pack_values(column: Column, values: Sequence[Any]) -> Any:
    """One value for each step as an array or a list; an array has NaN for None."""
    dtype = DTYPES.get(column.kind)
    return list(values) if dtype is None else np.array(values, dtype)


def unpack_values(column: Column, packed: Any) -> list[Any]:
    if column.kind not in DTYPES:
        return list(packed)
    values: list[Any] = packed.tolist()
    return values if column.default is not None else [None if value != value else value for value in values]


def packed_column(columns: Columns, column: Column) -> Any:
    """The array or list of a column that has one value for each step."""
    is_carried = column.stored is Storage.CARRIED
    return columns.carried[column.packed] if is_carried else getattr(columns, column.packed)


def pack(steps: Sequence[Step]) -> Columns:
    values = zip(*map(SCALARS, steps), strict=True) if steps else ((),) * len(PACKING)
    scalars: dict[str, Any] = {
        name: list(of_steps) if dtype is None else np.array(of_steps, dtype)
        for (name, dtype), of_steps in zip(PACKING, values, strict=True)
    }
    response_lengths = [len(s.response_ids) for s in steps]
    return Columns(
        added=join([part for s in steps for part in (s.prompt_ids, s.response_ids)], np.int32),
        logprobs=join([_logprobs(s) for s in steps], np.float32),
        mask=join_masks([s.response_mask for s in steps], response_lengths),
        prompt_lengths_S=np.array([len(s.prompt_ids) for s in steps], np.int32),
        response_lengths_S=np.array(response_lengths, np.int32),
        carried={name: scalars.pop(name) for name in CARRIED_NAMES},
        **scalars,
    )


def unpack(columns: Columns, *, copy: bool) -> list[Step]:
    """The steps. With `copy`, each step owns its arrays, so that a kept step does not keep the whole message alive."""
    own = np.copy if copy else np.asarray
    tokens, all_trained = columns.tokens, bool(columns.mask.all())
    token_ends, response_ends = columns.token_offsets_S[1:].tolist(), offsets(columns.response_lengths_S)[1:].tolist()
    lengths = zip(columns.prompt_lengths_S.tolist(), columns.response_lengths_S.tolist(), strict=True)
    scalars = zip(*(unpack_values(column, packed_column(columns, column)) for column in SCALAR_COLUMNS), strict=True)
    steps: list[Step] = []
    for token_end, response_end, (prompt, response), values in zip(
        token_ends, response_ends, lengths, scalars, strict=True
    ):
        of_step = own(tokens[token_end - prompt - response : token_end])
        of_response = slice(response_end - response, response_end)
        logprobs = columns.logprobs[of_response]
        is_known = response > 0 and logprobs[0] == logprobs[0]
        is_masked = not all_trained and not columns.mask[of_response].all()
        arrays = (
            of_step[:prompt],
            of_step[prompt:],
            own(logprobs) if is_known else None,
            own(columns.mask[of_response]) if is_masked else None,
        )
        steps.append(Step(**dict(zip(UNPACKED, (*arrays, *values), strict=True))))
    return steps


def cut(columns: Columns, sizes: Sequence[int]) -> list[Columns]:
    """The first so many steps, then the next, …, as views."""
    if columns.bases is not None and not _is_within(columns.bases, sizes):
        columns = columns.expanded()
    bases = columns.bases
    lengths_S = columns.lengths_S if bases is None else columns.lengths_S - bases.shared_S
    tokens, responses = offsets(lengths_S).tolist(), offsets(columns.response_lengths_S).tolist()

    def piece(start: int, end: int) -> Columns:
        of_responses, here = slice(responses[start], responses[end]), slice(start, end)
        values: dict[str, Any] = {name: getattr(columns, name)[here] for name in PER_STEP}
        return Columns(
            added=columns.added[tokens[start] : tokens[end]],
            logprobs=columns.logprobs[of_responses],
            mask=columns.mask[of_responses],
            carried={name: column[here] for name, column in columns.carried.items()},
            bases=None if bases is None else _moved(PrefixLinks(bases.base_S[here], bases.shared_S[here]), -start),
            sent_at=columns.sent_at,
            **values,
        )

    return [piece(start, end) for start, end in pairwise(accumulate(sizes, initial=0))]


def stack(parts: Sequence[Columns]) -> Columns:
    """The steps of the first part, then those of the second, …; a single part is returned as it is."""
    if len(parts) == 1:
        return parts[0]

    def whole(name: str) -> Any:
        return _joined([getattr(part, name) for part in parts])

    if any(part.bases is None for part in parts):  # a tree without some of the steps would be misread
        parts = [part.expanded() for part in parts]
    carried = {name: _joined([part.carried[name] for part in parts]) for name in parts[0].carried}
    return Columns(
        **{name: whole(name) for name in (*FLAT, *PER_STEP)},
        carried=carried,
        bases=_stacked_bases(parts),
        sent_at=parts[0].sent_at,
    )


# -- as bytes, for a file ----------------------------------------------------------------------------------------------


def to_bytes(steps: Sequence[Step]) -> bytes:
    columns = pack(steps)
    values = {name: getattr(columns, name) for name in ("tokens", "logprobs", "mask", *PER_STEP)}
    return stored_values(values | dict(columns.carried))


def from_bytes(packed: bytes) -> list[Step]:
    """The steps; a column that an older version did not write has its default. ValueError for other bytes."""
    try:
        values = read_stored(packed)
        values["exactness"] = [Exactness(grade) for grade in values["exactness"]]
        values["version_spans"] = [tuple(VersionSpan(*span) for span in spans) for spans in values["version_spans"]]
        return unpack(make_columns(len(values["uids"]), values), copy=True)
    except (KeyError, TypeError) as failure:
        raise ValueError(f"these are no packed steps of this version: {failure!r}") from None


# -- parts -------------------------------------------------------------------------------------------------------------


def join(parts: list[NDArray[D]], dtype: type[D]) -> NDArray[D]:
    """The parts end to end; an empty array if there are none."""
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def _logprobs(step: Step) -> FloatArray:
    if step.response_logprobs is None:
        return np.full(len(step.response_ids), np.nan, np.float32)
    return step.response_logprobs


def join_masks(masks: Sequence[BoolArray | None], lengths: Sequence[int]) -> BoolArray:
    """The masks end to end; None means that all of so many tokens are trained."""
    if not [mask for mask in masks if mask is not None]:
        return np.ones(sum(lengths), np.bool_)
    parts = zip(masks, lengths, strict=True)
    return np.concatenate([np.ones(length, np.bool_) if mask is None else mask for mask, length in parts])


def _joined(parts: list[Any]) -> Any:
    """Arrays or lists end to end."""
    return np.concatenate(parts) if isinstance(parts[0], np.ndarray) else [value for part in parts for value in part]


def _expand(columns: Columns, bases: PrefixLinks) -> IntArray:
    """All tokens. A base is an earlier row, so its tokens are already in place."""
    if not bases.shared_S.any():
        return columns.added
    starts_S = columns.token_offsets_S
    tokens = np.empty(int(starts_S[-1]), np.int32)
    starts, added_at = starts_S.tolist(), 0
    for i, (base, shared) in enumerate(zip(bases.base_S.tolist(), bases.shared_S.tolist(), strict=True)):
        middle, end = starts[i] + shared, starts[i + 1]
        if shared:
            tokens[starts[i] : middle] = tokens[starts[base] : starts[base] + shared]
        tokens[middle:end] = columns.added[added_at : added_at + end - middle]
        added_at += end - middle
    return tokens


def _is_within(bases: PrefixLinks, sizes: Sequence[int]) -> bool:
    """Whether every base is in the same piece as its step."""
    first_S = np.repeat([0, *accumulate(sizes)][:-1], sizes)
    base_S = bases.base_S[: len(first_S)]
    return bool(((base_S == NO_BASE) | (base_S >= first_S)).all())


def _moved(bases: PrefixLinks, by: int) -> PrefixLinks:
    return PrefixLinks(np.where(bases.base_S == NO_BASE, NO_BASE, bases.base_S + by).astype(np.int32), bases.shared_S)


def _stacked_bases(parts: Sequence[Columns]) -> PrefixLinks | None:
    starts = accumulate((len(part) for part in parts), initial=0)
    moved = [_moved(part.bases, start) for part, start in zip(parts, starts, strict=False) if part.bases is not None]
    if not moved:
        return None
    return PrefixLinks(
        np.concatenate([part.base_S for part in moved]), np.concatenate([part.shared_S for part in moved])
    )
