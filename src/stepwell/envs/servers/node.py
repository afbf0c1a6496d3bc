"""A sequence to train on, as a managed session hands it out."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from stepwell.envs.scored_data import UNTRAINED, ScoredDataItem
from stepwell.envs.servers.sequences import Line
from stepwell.steps.step import GRADES

NO_LOGPROB = 1.0
"""Where nothing was sampled: no log-probability is positive."""


@dataclass(frozen=True, slots=True)
class SequenceNode:
    """One conversation: the last prompt and the last answer, trained at what the model wrote in any of its turns."""

    tokens: list[int]
    masked_tokens: list[int]
    """The token where it is trained, -100 where it is not."""
    logprobs: list[float] | None
    """1.0 where nothing was sampled; None where the server gave none for some of what was."""
    full_text: str
    """The tokens as text; empty where the session has no tokenizer."""
    metadata: dict[str, Any]
    """`finish_reason`, of the last turn, and `turns`, how many there were."""
    policy_version: int | None
    """Of the oldest turn whose version is known."""
    exactness: str
    """engine, or retokenized where the tokens of any turn had to be encoded again from text."""

    def item(self, score: float, **more: Any) -> ScoredDataItem:
        """The rollout to return from collect_trajectory; `more` are further keys of it: messages, overrides."""
        item = ScoredDataItem(
            tokens=self.tokens,
            masks=self.masked_tokens,
            scores=score,
            inference_logprobs=self.logprobs,
            policy_version=self.policy_version,
            exactness=self.exactness,
        )
        return {**item, **more}  # type: ignore[typeddict-item]


def node_of(line: Line, full_text: str) -> SequenceNode:
    last = line.turns[-1]
    masked = np.full(len(last.prompt_ids) + len(last.response_ids), UNTRAINED, np.int32)
    versions = [turn.policy_version for turn in line.turns if turn.policy_version is not None]
    for turn in line.turns:
        start = len(turn.prompt_ids)
        masked[start : start + len(turn.response_ids)] = turn.response_ids
    return SequenceNode(
        tokens=tokens_of(line),
        masked_tokens=masked.tolist(),
        logprobs=_logprobs(line),
        full_text=full_text,
        metadata={"finish_reason": last.finish_reason, "turns": len(line.turns)},
        policy_version=min(versions, default=None),
        exactness=str(max((turn.exactness for turn in line.turns), key=lambda grade: GRADES[grade])),
    )


def tokens_of(line: Line) -> list[int]:
    return list(np.frombuffer(line.tokens, np.int32).tolist())


def _logprobs(line: Line) -> list[float] | None:
    last = line.turns[-1]
    logprobs = np.full(len(last.prompt_ids) + len(last.response_ids), NO_LOGPROB, np.float32)
    for turn in line.turns:
        if turn.logprobs is None:
            return None
        start = len(turn.prompt_ids)
        logprobs[start : start + len(turn.logprobs)] = turn.logprobs
    return list(logprobs.tolist())
