"""What environments make: items to roll out, rollouts, and groups of rollouts, under their names on the wire.

These are the user's own dictionaries, which travel as they are. What always holds: a group made by `gather` has one
entry a rollout in every list it has, and leaves no key of its rollouts out.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from stepwell.errors import BadRequest

Item = Any
"""Whatever get_next_item gives: a prompt, a row of a dataset, a state. None says that there are no more."""

Messages = list[dict[str, Any]]

UNTRAINED = -100
"""In masks: not trained here. Elsewhere a mask has the token itself."""


class ScoredDataItem(TypedDict, total=False):
    """One rollout. tokens, masks and scores must be there."""

    tokens: list[int]
    masks: list[int]
    """Of the length of tokens: the token where it is trained, -100 where it is not."""
    scores: float
    inference_logprobs: list[float] | None
    """Of the length of tokens: 1.0 where nothing was sampled."""
    policy_version: int | None
    """The number of the weights that wrote it, the oldest of them."""
    exactness: str
    """engine, submitted or retokenized: how far the tokens can be trusted to be those that were sampled."""
    messages: Messages | None
    advantages: list[float] | None
    ref_logprobs: list[float] | None
    overrides: dict[str, Any] | None
    """For the trainer, of this rollout."""
    group_overrides: dict[str, Any] | None
    """For the trainer, of the whole group."""
    generation_params: dict[str, Any] | None
    images: Any
    distill_token_ids: list[list[int]] | None
    distill_logprobs: list[list[float]] | None


class ScoredDataGroup(TypedDict, total=False):
    """Rollouts of one item: each list has one entry a rollout."""

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    inference_logprobs: list[list[float]] | None
    policy_versions: list[int | None]
    exactness: list[str]
    messages: list[Messages] | None
    advantages: list[list[float]] | None
    ref_logprobs: list[list[float]] | None
    overrides: list[dict[str, Any]] | None
    group_overrides: dict[str, Any] | None
    generation_params: dict[str, Any] | None
    images: list[Any] | None
    distill_token_ids: list[list[list[int]]] | None
    distill_logprobs: list[list[list[float]]] | None


OF_GROUPS = ("group_overrides", "generation_params")
"""Keys whose value is one for the whole group: the rollouts' are laid over one another."""
PLURALS = {"policy_version": "policy_versions"}
FILLERS: dict[str, Callable[[], Any]] = {"exactness": lambda: "submitted", "overrides": dict, "messages": list}
"""What stands for a rollout that lacks what others of its group have."""
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
"""Keys for which nothing could stand: a trainer would compute with it."""


def gather(rollouts: Sequence[ScoredDataItem]) -> ScoredDataGroup:
    """The rollouts of one item, as a group."""
    keys = dict.fromkeys(key for rollout in rollouts for key in rollout if _has(rollout, key))
    group: dict[str, Any] = {}
    for key in keys:
        if key in OF_GROUPS:
            group[key] = {name: value for each in rollouts for name, value in (_get(each, key) or {}).items()}
        else:
            group[PLURALS.get(key, key)] = [_get(rollout, key) for rollout in rollouts]
    return _with_fillers(group)  # type: ignore[return-value]


def _with_fillers(group: dict[str, Any]) -> dict[str, Any]:
    """With something harmless for rollouts that lack what others have; BadRequest where nothing is harmless."""
    for key, values in group.items():
        if key in FILLERS:
            group[key] = [FILLERS[key]() if value is None else value for value in values]
        elif key in ALL_OR_NONE and any(value is None for value in values):
            raise BadRequest(f"some rollouts of the group have {key} and others have none: give it to all of them")
    return group


def _has(rollout: ScoredDataItem, key: str) -> bool:
    return _get(rollout, key) is not None


def _get(rollout: ScoredDataItem, key: str) -> Any:
    read: Mapping[str, Any] = rollout
    return read.get(key)
