"""The reward function `next_state`: a step is judged by what the user or a tool says after it."""

from stepwell.rewards.builtin.next_state import next_state

__all__ = ["next_state"]
