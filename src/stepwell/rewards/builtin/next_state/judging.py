"""`next_state`: each step gets a reward by what was said after it; without evidence it gets none.

- Nothing said yet (the last step) or nothing that a rule knows is an abstention, which is not 0.
- Every reward has its evidence: the rule, the speaker and the text.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from pydantic import ConfigDict

from stepwell.pool.api.scoring import Score
from stepwell.rewards.builtin.next_state import ModelJudge, ModelJudgeOptions
from stepwell.rewards.builtin.next_state_rules import (
    RULES,
    Abstention,
    Evidence,
    NextState,
    Rule,
    Speaker,
    extended,
    first_evidence,
    next_states,
)
from stepwell.rewards.function import Call
from stepwell.rewards.sample import Sample

Judged: TypeAlias = Evidence | Abstention | None
"""None if nothing was said yet."""

ABSTAINED, UNREADABLE = "abstained", "unreadable"


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleOptions:
    """More patterns, or another reward, for a rule; or a new rule."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    reward: float | None = None
    patterns: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    speaker: Speaker | None = None


def next_state(
    *,
    rules: Mapping[str, RuleOptions] | None = None,
    judge: ModelJudgeOptions | None = None,
    ask: Literal["unmatched", "always"] = "unmatched",
) -> Call:
    """The step rewards of a conversation, by rules; `rules` extends the table by name.

    A judge is asked where no rule fits or, with `ask` "always", instead of the rules.
    """
    table = RULES
    for name, wanted in (rules or {}).items():
        table = extended(
            table,
            name,
            reward=wanted.reward,
            patterns=wanted.patterns,
            unless=wanted.unless,
            speaker=wanted.speaker,
        )
    for rule in table:
        rule.compile()
    if judge is None:
        return ByRules(table)
    return ByRulesAndJudge(table if ask == "unmatched" else (), ModelJudge(judge))


@dataclass(frozen=True)
class ByRules:
    rules: tuple[Rule, ...]
    by_step: ClassVar[bool] = True

    def __call__(self, sample: Sample) -> Score:
        return score_of([judged_by_rules(self.rules, state) for state in next_states(sample.steps)])


@dataclass(frozen=True)
class ByRulesAndJudge:
    rules: tuple[Rule, ...]
    judge: ModelJudge
    by_step: ClassVar[bool] = True

    async def __call__(self, sample: Sample) -> Score:
        async with self.judge.session() as session:

            async def judged(state: NextState | None) -> Judged:
                by_rules = judged_by_rules(self.rules, state)
                if state is None or not state.utterances or isinstance(by_rules, Evidence):
                    return by_rules
                return await self.judge.judge(session, state)

            return score_of(await asyncio.gather(*map(judged, next_states(sample.steps))))


def judged_by_rules(rules: Sequence[Rule], state: NextState | None) -> Judged:
    """None if nothing was said yet."""
    return None if state is None else first_evidence(rules, state) or Abstention()


def score_of(judged: Sequence[Judged]) -> Score:
    """The parts count the steps by rule."""
    counts = Counter(map(_kind, judged))
    rewards = tuple(each.reward if isinstance(each, Evidence) else None for each in judged)
    return Score(
        sum(reward for reward in rewards if reward is not None),
        parts=dict(counts),
        step_rewards=rewards,
        step_details=tuple(map(_details, judged)),
        steps_only=True,
    )


def _kind(judged: Judged) -> str:
    if isinstance(judged, Evidence):
        return judged.rule
    return UNREADABLE if judged is not None and judged.is_unreadable else ABSTAINED


def _details(judged: Judged) -> dict[str, str] | None:
    if isinstance(judged, Evidence):
        return judged.details()
    return None if judged is None else {ABSTAINED: judged.why}
