"""A conversation read back from its tokens, by the markers that chat templates put between turns.

What always holds: only a whole token is a marker, so that text which merely looks like one does not end a turn; what
stands in no turn is kept, in a turn "text", unless it is blank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stepwell.steps.step import IntArray, Step

BEGIN = {"<|im_start|>": "\n", "<|start_header_id|>": "<|end_header_id|>"}
"""The token before a role, and what stands behind the role: in ChatML, and in the form of Llama 3."""
BETWEEN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|begin_of_text|>", "<|end_of_text|>")
NO_ROLE = "text"
ROLES = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    "developer": "system",
    "function": "tool",
    "ipython": "tool",
}
"""As templates call them, and as they are called here."""


@dataclass(frozen=True, slots=True)
class ConversationTurn:
    role: str
    text: str
    is_response: bool = False


def shared_length(before: Step | None, prompt_ids: IntArray) -> int:
    """How many tokens of a prompt are those of the step before, its response included."""
    if before is None:
        return 0
    known = np.concatenate([before.prompt_ids, before.response_ids])
    length = min(len(known), len(prompt_ids))
    differing = np.flatnonzero(known[:length] != prompt_ids[:length])
    return int(differing[0]) if len(differing) else length


def conversation(prompt: Sequence[str], response: Sequence[str]) -> list[ConversationTurn]:
    """The turns of what is new in a step's prompt, then those of its response: several, if it is a whole exchange."""
    answered = _split(response, "assistant") or [ConversationTurn("assistant", "")]
    return [*_split(prompt, NO_ROLE), *(ConversationTurn(turn.role, turn.text, is_response=True) for turn in answered)]


def _split(texts: Sequence[str], role: str) -> list[ConversationTurn]:
    turns: list[ConversationTurn] = []
    so_far: list[str] = []
    ends_role: str | None = None

    def close() -> None:
        text = "".join(so_far)
        so_far.clear()
        if text.strip():
            turns.append(ConversationTurn(role, text.lstrip("\n")))

    for text in texts:
        if text in BEGIN:
            close()
            role, ends_role = NO_ROLE, BEGIN[text]
        elif text in BETWEEN:
            close()
            role, ends_role = NO_ROLE, None
        elif ends_role is not None and ends_role in text:
            named, _, rest = text.partition(ends_role)
            said = "".join([*so_far, named])
            so_far.clear()
            role, ends_role = ROLES.get(said.strip(), NO_ROLE), None
            so_far.append(rest)
        else:
            so_far.append(text)
    close()
    return turns
