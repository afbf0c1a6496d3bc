"""What the fake engine can be told to do wrong, and for how many requests."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """The misbehaviour of one generation. "At token k" means after k good tokens, so 0 is before the first.

    Each can be set alone; set together they all apply, and what ends the reply first wins.
    """

    delay_s: float = 0.0
    """Wait before anything is answered."""

    token_delay_s: float = 0.0
    """Wait between two tokens; an unstreamed reply waits as long in all."""

    hang_up: bool = False
    """Close the connection after the delay, without a byte of an answer."""

    error_status: int | None = None
    """Answer with this status and vLLM's error object instead of generating."""

    error_at_token: int | None = None
    """Streamed: an error payload and the end, in vLLM's way. Unstreamed: finish_reason "error", which vLLM turns into
    a status 500 (for that, see `error_status`); a client should not take it for data either way."""

    abort_at_token: int | None = None
    """End there with finish_reason "abort", as vLLM does for requests in flight when it is paused with mode=abort."""

    disconnect_at_token: int | None = None
    """Close the connection hard there. Unstreamed: after the headers, before the body."""

    drop_ids: bool = False
    """Send no ids of the reply, although asked to."""

    short_ids: bool = False
    """Leave out the reply's last id, so that there is one fewer than log-probabilities."""

    logprob_value: float | None = None
    """Put this in place of the middle token's log-probability. NaN travels as null, as pydantic writes it in vLLM."""

    version_change_at_token: int | None = None
    """From this token on the reply is written by `new_version`, which stays in force for later requests."""

    new_version: str = "changed"

    wrong_usage: bool = False
    """Report one completion token too many."""

    malformed: Literal["not_json", "no_choices"] | None = None
    """The body (streamed: each chunk) is cut off in mid-JSON, or has no choices."""

    no_done: bool = False
    """End a stream without `[DONE]`."""

    silent_s: float = 0.0
    """Say nothing for so long, once, at token `silent_at_token`."""

    silent_at_token: int = 0

    awkward_splits: bool = False
    """Send a stream in pieces that end within "data: ", within characters and within line ends."""

    invalid_utf8: bool = False
    """Put bytes that are no UTF-8 into the text of the body (streamed: of each chunk)."""

    wrong_id: bool = False
    """Send another id in place of the middle token's."""

    raw_logprobs: bool = False
    """Log-probabilities are those before temperature, as in a vLLM without --logprobs-mode processed_logprobs."""

    ignore_seed: bool = False
    """The same request is sampled otherwise each time."""

    ignore_stop: bool = False
    """Go on past a stop string."""

    forget_history: bool = False
    """The template leaves out the first token of the assistant's earlier turns."""

    no_tool_parser: bool = False
    """Refuse requests with tools, as a vLLM without --enable-auto-tool-choice."""

    times: int | None = None
    """How many generation requests are hit before all is well again; None for every one."""


NO_FAULTS = Faults()


class FaultSwitch:
    """Deals the faults in force out to the requests that arrive, and counts them."""

    def __init__(self) -> None:
        self._faults = NO_FAULTS
        self._dealt = 0

    @property
    def faults(self) -> Faults:
        return self._faults

    def turn(self, faults: Faults) -> None:
        self._faults, self._dealt = faults, 0

    def deal(self) -> Faults:
        """The faults of the next request."""
        self._dealt += 1
        if self._faults.times is not None and self._dealt > self._faults.times:
            return NO_FAULTS
        return self._faults
