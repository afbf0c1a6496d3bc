"""The outcomes of a call that might have continued a recorded conversation. Every outcome but BRIDGED is a plain
re-render."""

from enum import StrEnum


class BridgeOutcome(StrEnum):
    BRIDGED = "bridged"
    FIRST_TURN = "first_turn"
    """The request has no assistant message: there is nothing to continue."""
    NO_PARENT = "no_parent"
    """No recorded step has these messages and this reply."""
    EDITED = "edited"
    """A recorded step has these messages, but its reply or its thinking was another one."""
    AMBIGUOUS = "ambiguous"
    """Several steps with different tokens fit."""
    TOOLS_CHANGED = "tools_changed"
    TEMPLATE_CHANGED = "template_changed"
    """The engine's chat template or the fields for it are others."""
    CUT_SHORT = "cut_short"
    """The reply did not come to its own end, because of max_tokens, for example."""
    NO_TAIL = "no_tail"
    """The request ends with the reply."""
    TAIL_ROLE = "tail_role"
    """A message after the reply is neither of a tool, nor of a user, nor of the system."""
    MEDIA = "media"
    """A message has other content than text, which engines render themselves."""
    OPTIONS = "options"
    """The request changes how its prompt is rendered, as by continue_final_message."""
    THINKING = "thinking"
    """The model would see thinking that the setting `thinking` leaves out."""
    NOT_ANCHORED = "not_anchored"
    """The chat template does not show the reply, or not what follows it, so the new part cannot be cut out."""
    HEAD_CHANGES = "head_changes"
    """The chat template renders the earlier messages in another way when these messages follow."""
    CLOSE_DIFFERS = "close_differs"
    """The reply does not end in the token with which the chat template ends a reply."""
    NO_RENDERER = "no_renderer"
    """No engine renders without generating and takes ids, or the engines have different chat templates."""
    UNPROVEN = "unproven"
    """The engine's tokenize route gives other ids than the engine used."""
    RENDER_FAILED = "render_failed"
    POOL_AWAY = "pool_away"
    OTHER_ENGINE = "other_engine"
    """The call went to an engine with another chat template."""
    REFUSED = "refused"
    """The engine refused the ids, and got the messages instead."""
    ECHO_DIFFERS = "echo_differs"
    """The engine reported other prompt ids than it was sent. The step has those that it reported."""
    FAILED = "failed"
    """An error of the bridge itself; the log has it."""


class CannotBridge(Exception):
    """Why a call is rendered by its engine."""

    def __init__(self, outcome: BridgeOutcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome
