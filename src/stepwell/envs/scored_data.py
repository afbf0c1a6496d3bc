"""The data that environments make: items to roll out, rollouts, and groups of rollouts, with the key names of the wire.

- Rollouts and groups are the author's own dictionaries; they travel unchanged, without empty lists.
- Every list of a group made by `gather` has one entry per rollout, and the group has every key of its rollouts.
- A group that is not worth sending is dropped for exactly one cause, under which it is counted.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypedDict

import orjson

from stepwell.common.files import open_private
from stepwell.errors import BadRequest

Item = Any
"""The result of get_next_item: a prompt, a row of a dataset, a state. None means that there is none now."""

Message = dict[str, Any]
Messages = list[Message]

UNTRAINED = -100
"""The entry of a mask whose token is not trained. A trained token stands in the mask itself."""

MALFORMED = "malformed"
WRONG_SIZE = "wrong size"
EQUAL_SCORES = "equal scores"
TOO_LONG = "too long"


class ScoredDataItem(TypedDict, total=False):
    """One rollout. tokens, masks and scores are required."""

    tokens: list[int]
    masks: list[int]
    """The masks, as long as tokens: the token if it is trained, -100 if it is not."""
    scores: float
    inference_logprobs: list[float] | None
    """The log-probabilities, as long as tokens: 1.0 for tokens that were not sampled."""
    policy_version: int | None
    """The version of the weights that wrote it; if there are several, the oldest."""
    exactness: str
    """engine, submitted or retokenized: how certain it is that these tokens were sampled."""
    temperature: float | None
    """The temperature at which the rollout was sampled."""
    untrainable: str | None
    """The reason why the rollout is left out of training, as "kind: text"; None if it is not."""
    model: str
    """The model or adapter that wrote it."""
    messages: Messages | None
    advantages: list[float] | None
    ref_logprobs: list[float] | None
    overrides: dict[str, Any] | None
    """Settings for the trainer, about this rollout."""
    group_overrides: dict[str, Any] | None
    """Settings for the trainer, about the whole group."""
    generation_params: dict[str, Any] | None
    images: Any
    distill_token_ids: list[list[int]] | None
    distill_logprobs: list[list[float]] | None


class ScoredDataGroup(TypedDict, total=False):
    """Rollouts of one item: each list has one entry per rollout."""

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    inference_logprobs: list[list[float]] | None
    policy_versions: list[int | None]
    exactness: list[str]
    temperatures: list[float | None]
    untrainable: list[str | None]
    models: list[str]
    messages: list[Messages] | None
    advantages: list[list[float]] | None
    ref_logprobs: list[list[float]] | None
    overrides: list[dict[str, Any]] | None
    group_overrides: dict[str, Any] | None
    generation_params: dict[str, Any] | None
    images: list[Any] | None
    distill_token_ids: list[list[list[int]]] | None
    distill_logprobs: list[list[list[float]]] | None


Groups: TypeAlias = ScoredDataGroup | list[ScoredDataGroup | None] | None

GROUP_KEYS = ("group_overrides", "generation_params")
"""Keys with one value for the whole group: the dictionaries of the rollouts are merged."""
PLURALS = {"policy_version": "policy_versions", "temperature": "temperatures", "model": "models"}
FILLERS: dict[str, Callable[[], Any]] = {"exactness": lambda: "submitted", "overrides": dict, "messages": list}
"""The value of a rollout that lacks a key which others of its group have."""
ALL_OR_NONE = (
    "tokens",
    "masks",
    "scores",
    "inference_logprobs",
    "advantages",
    "ref_logprobs",
    "distill_token_ids",
    "distill_logprobs",
)
"""Keys without a filler: a trainer would compute with it."""


def gather(rollouts: Sequence[ScoredDataItem]) -> ScoredDataGroup:
    """The rollouts of one item, as a group."""
    mappings: Sequence[Mapping[str, Any]] = rollouts
    keys = dict.fromkeys(key for rollout in mappings for key, value in rollout.items() if value is not None)
    group: dict[str, Any] = {}
    for key in keys:
        values = [rollout.get(key) for rollout in mappings]
        if key in GROUP_KEYS:
            group[key] = {name: value for own in values for name, value in (own or {}).items()}
        else:
            group[PLURALS.get(key, key)] = values
    return _with_fillers(group)  # type: ignore[return-value]


def without_empty_lists(group: ScoredDataGroup) -> None:
    """A list without entries says nothing about the rollouts, so its key is removed. Atropos' groups have many."""
    mapping: dict[str, Any] = group  # type: ignore[assignment]
    for key in [key for key, value in mapping.items() if isinstance(value, list) and not value and key != "tokens"]:
        del mapping[key]


def group_fault(
    group: ScoredDataGroup, *, group_size: int, max_length: int | None, may_be_equal: bool
) -> tuple[str, str] | None:
    """The cause for which the group is dropped, and its details; None if the group is fine."""
    fault = _malformed(group)
    if fault:
        return MALFORMED, fault
    expected = (group.get("group_overrides") or {}).get("group_size", group_size)
    if len(group["tokens"]) != expected:
        return WRONG_SIZE, f"{len(group['tokens'])} rollouts instead of {expected}"
    if len(set(group["scores"])) == 1 and not may_be_equal:
        return EQUAL_SCORES, f"every score is {group['scores'][0]}"
    longest = max(map(len, group["tokens"]))
    if max_length is not None and longest > max_length:
        return TOO_LONG, f"a rollout has {longest} tokens; the trainer accepts {max_length}"
    return None


def as_list(groups: Any) -> list[Any]:
    """The result of a hook, as a list: a group, several of them, or None."""
    if groups is None:
        return []
    return [group for group in groups if group is not None] if isinstance(groups, list) else [groups]


def append_group(path: Path, group: Mapping[str, Any]) -> None:
    """Adds one JSON line to the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab", opener=open_private) as file:
        file.write(orjson.dumps(group, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))


def _with_fillers(group: dict[str, Any]) -> dict[str, Any]:
    """Fills in harmless values; BadRequest for a key without a filler."""
    for key, values in group.items():
        if key in FILLERS:
            group[key] = [FILLERS[key]() if value is None else value for value in values]
        elif key in ALL_OR_NONE and any(value is None for value in values):
            raise BadRequest(f"some rollouts of the group have {key} and others have none: give it to all of them")
    return group


def _malformed(group: ScoredDataGroup) -> str:
    for key in ("tokens", "masks", "scores"):
        if group.get(key) is None:
            return f"it has no {key}"
    if not len(group["tokens"]):
        return "it has no rollouts"
    if not len(group["tokens"]) == len(group["masks"]) == len(group["scores"]):
        return "the numbers of tokens, masks and scores differ"
    if not all(map(_is_number, group["scores"])):
        return f"its scores are {list(group['scores'])}"
    for key in ("masks", "inference_logprobs", "advantages", "ref_logprobs"):
        values: Any = group.get(key)
        if values is not None and _lengths(values) != _lengths(group["tokens"]):
            return f"its {key} are not as long as its tokens"
    return ""


def _lengths(rows: Sequence[Any]) -> list[int]:
    """-1 for what is no list."""
    return [len(row) if hasattr(row, "__len__") else -1 for row in rows]


def _is_number(score: object) -> bool:
    try:
        return math.isfinite(score)  # type: ignore[arg-type]
    except TypeError:
        return False
