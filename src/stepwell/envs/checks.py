"""Which groups are worth sending. A group that is not is dropped for one cause, under which it is counted."""

import math
from collections.abc import Sequence
from typing import Any

from stepwell.envs.scored_data import ScoredDataGroup

MALFORMED = "malformed"
WRONG_SIZE = "wrong size"
EQUAL_SCORES = "equal scores"
TOO_LONG = "too long"


def fault_of(
    group: ScoredDataGroup, *, group_size: int, max_length: int | None, may_be_equal: bool
) -> tuple[str, str] | None:
    """The cause for which the group is dropped, and the cause in full; None if it is fine."""
    fault = _malformed(group)
    if fault:
        return MALFORMED, fault
    wanted = (group.get("group_overrides") or {}).get("group_size", group_size)
    if len(group["tokens"]) != wanted:
        return WRONG_SIZE, f"{len(group['tokens'])} rollouts instead of {wanted}"
    if len(set(group["scores"])) == 1 and not may_be_equal:
        return EQUAL_SCORES, f"every score is {group['scores'][0]}"
    longest = max(map(len, group["tokens"]))
    if max_length is not None and longest > max_length:
        return TOO_LONG, f"a rollout has {longest} tokens; the trainer takes {max_length}"
    return None


def _malformed(group: ScoredDataGroup) -> str:
    for key in ("tokens", "masks", "scores"):
        if group.get(key) is None:
            return f"it has no {key}"
    if not len(group["tokens"]):
        return "it has no rollouts"
    if not len(group["tokens"]) == len(group["masks"]) == len(group["scores"]):
        return "tokens, masks and scores are not equally many"
    if not all(map(_is_number, group["scores"])):
        return f"its scores are {list(group['scores'])}"
    for key in ("masks", "inference_logprobs", "advantages", "ref_logprobs"):
        if not _fits(group.get(key), group["tokens"]):
            return f"its {key} are not as long as its tokens"
    return ""


def _fits(values: Any, tokens: Sequence[Sequence[int]]) -> bool:
    return values is None or list(map(len, values)) == list(map(len, tokens))


def _is_number(score: object) -> bool:
    try:
        return math.isfinite(score)  # type: ignore[arg-type]
    except TypeError:
        return False
