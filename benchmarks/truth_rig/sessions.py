"""All rollouts of two prompts, of one to three steps, as groups or as sessions without siblings, in a real pool.

A step is one token; the token END ends the rollout. The advantages and weights that a case names are computed here from
their definitions, in plain Python, and the gradient from them by autograd.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import exp
from statistics import fmean, stdev

import numpy as np
import torch

from benchmarks.truth_rig.gradients import uphill
from benchmarks.truth_rig.policy import ANSWERS, PARTS, SampledToken, TreePolicy, logprob, random_table, share
from stepwell.pool.api.leasing import BatchRequest, Unit
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.producing import Registration
from stepwell.pool.client.batch import Batch, batch_of
from stepwell.pool.rules.pool import Pool
from stepwell.steps.advantages import MEMORY, NO_PAST, RunningStatistics
from stepwell.steps.columns import pack
from stepwell.steps.step import Exactness, Step, ids_array, logprobs_array
from stepwell.trainers.algorithms import AlgorithmKind
from stepwell.trainers.learner import Learner
from stepwell.trainers.rows import choose_rows
from stepwell.trainers.settings import Settings

END, STEPS = 0, 3
EASY, HARD = 5, 3
"""The prompts: token ids of the context."""
PAST = {EASY: [4.0, 5.0, 4.5], HARD: [0.0, 1.0]}
"""The returns of an earlier batch."""
FIXED_LENGTH = 7
TEMPERATURE = 1.0


@dataclass(frozen=True, slots=True)
class SampledRollout:
    uid: str
    prompt: int
    tokens: tuple[int, ...]
    rewards: tuple[float, ...]
    """Of the steps."""
    outcome: float

    @property
    def total(self) -> float:
        return self.outcome + sum(self.rewards)

    def sampled(self) -> Iterator[SampledToken]:
        for place, token in enumerate(self.tokens):
            yield SampledToken((self.prompt, *self.tokens[:place]), token, place, 0)


Rollouts = Sequence[SampledRollout]
Advantages = Callable[[Rollouts], list[list[float]]]
"""Of each step of each rollout."""
TokenWeights = Callable[[Rollouts], list[float]]
"""Of each token of each rollout."""


def constant(of_rollouts: Callable[[Rollouts], list[float]]) -> Advantages:
    """All steps of a rollout have the same."""

    def advantages(rollouts: Rollouts) -> list[list[float]]:
        computed = of_rollouts(rollouts)
        return [[value] * len(rollout.tokens) for value, rollout in zip(computed, rollouts, strict=True)]

    return advantages


def of_prompt(rollouts: Rollouts, prompt: int) -> list[float]:
    return [rollout.total for rollout in rollouts if rollout.prompt == prompt]


def in_group(rollouts: Rollouts, *, others: bool = False, by_std: bool = True) -> list[float]:
    advantages = []
    for rollout in rollouts:
        group = of_prompt(rollouts, rollout.prompt)
        mean = (sum(group) - rollout.total) / (len(group) - 1) if others else fmean(group)
        advantages.append((rollout.total - mean) / (stdev(group) if by_std else 1.0))
    return advantages


def in_batch(rollouts: Rollouts) -> list[float]:
    totals = [rollout.total for rollout in rollouts]
    return [(total - fmean(totals)) / stdev(totals) for total in totals]


def by_past(rollouts: Rollouts) -> list[float]:
    """Each task against its own past; the deviation also over the batch, with exponential weights."""
    advantages = []
    for rollout in rollouts:
        past, now = PAST[rollout.prompt], of_prompt(rollouts, rollout.prompt)
        kept = exp(-len(now) / MEMORY)
        weights = [kept * (1 - exp(-len(past) / MEMORY)) / len(past)] * len(past) + [(1 - kept) / len(now)] * len(now)
        mean = float(np.average([*past, *now], weights=weights))
        deviation = float(np.average([(value - mean) ** 2 for value in (*past, *now)], weights=weights)) ** 0.5
        advantages.append((rollout.total - fmean(past)) / deviation)
    return advantages


def singles_in_batch(rollouts: Rollouts) -> list[float]:
    """The hard prompt has groups of one."""
    pairs = zip(rollouts, in_group(rollouts), in_batch(rollouts), strict=True)
    return [of_batch if rollout.prompt == HARD else of_group for rollout, of_group, of_batch in pairs]


def own_rewards(rollouts: Rollouts) -> list[list[float]]:
    """Each step by itself, against all steps."""
    rewards = [reward for rollout in rollouts for reward in rollout.rewards]
    return [[(reward - fmean(rewards)) / stdev(rewards) for reward in rollout.rewards] for rollout in rollouts]


def rewards_to_go(rollouts: Rollouts) -> list[list[float]]:
    """Outcomes against all rollouts, rewards to go against all steps."""
    to_go = [[sum(rollout.rewards[place:]) for place in range(len(rollout.rewards))] for rollout in rollouts]
    outcome, mean = fmean([r.outcome for r in rollouts]), fmean([value for values in to_go for value in values])
    return [
        [rollout.outcome - outcome + value - mean for value in values]
        for rollout, values in zip(rollouts, to_go, strict=True)
    ]


def per_token(rollouts: Rollouts) -> list[float]:
    return [1 / sum(len(rollout.tokens) for rollout in rollouts)] * len(rollouts)


def per_sequence(rollouts: Rollouts) -> list[float]:
    return [1 / len(rollouts) / len(rollout.tokens) for rollout in rollouts]


def per_fixed_length(rollouts: Rollouts) -> list[float]:
    return [1 / len(rollouts) / FIXED_LENGTH] * len(rollouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineCase:
    name: str
    settings: Settings
    advantages: Advantages
    weights: TokenWeights = per_token
    in_groups: tuple[int, ...] = ()
    """The prompts whose rollouts form a group; all others are sessions."""
    is_exact: bool = False
    """Is the direction that of the exact policy gradient of both prompts together?"""
    past: dict[int, list[float]] = field(default_factory=dict)


BOTH = (EASY, HARD)
GROUPED = Settings(max_gradient_norm=1e9, fixed_length=FIXED_LENGTH, clip_low=0.5, clip_high=0.5)
"""Without a limit of the gradient, so that its length can be compared too."""


def of_algorithm(algorithm: AlgorithmKind) -> Settings:
    return Settings(algorithm=algorithm, max_gradient_norm=1e9, fixed_length=FIXED_LENGTH)


CASES = (
    BaselineCase(name="group", settings=GROUPED, advantages=constant(in_group), in_groups=BOTH),
    BaselineCase(
        name="group_undivided",
        settings=replace(GROUPED, divide_by_std=False),
        advantages=constant(lambda rollouts: in_group(rollouts, by_std=False)),
        in_groups=BOTH,
        is_exact=True,
    ),
    BaselineCase(
        name="leave_one_out",
        settings=replace(GROUPED, baseline="leave_one_out", divide_by_std=False),
        advantages=constant(lambda rollouts: in_group(rollouts, others=True, by_std=False)),
        in_groups=BOTH,
        is_exact=True,
    ),
    BaselineCase(
        name="batch", settings=replace(GROUPED, baseline="batch"), advantages=constant(in_batch), is_exact=True
    ),
    BaselineCase(
        name="running",
        settings=replace(GROUPED, baseline="running", baseline_key="task"),
        advantages=constant(by_past),
        past=PAST,
    ),
    BaselineCase(
        name="running_first_batch",
        settings=replace(GROUPED, baseline="running", divide_by_std=False),
        advantages=constant(lambda rollouts: [r.total - fmean([r.total for r in rollouts]) for r in rollouts]),
        is_exact=True,
    ),
    BaselineCase(
        name="none",
        settings=replace(GROUPED, baseline="none"),
        advantages=constant(lambda rollouts: [rollout.total for rollout in rollouts]),
        is_exact=True,
    ),
    BaselineCase(
        name="fallback",
        settings=replace(GROUPED, fallback_baseline="batch"),
        advantages=constant(singles_in_batch),
        in_groups=(EASY,),
    ),
    BaselineCase(
        name="steps",
        settings=replace(GROUPED, unit="steps", advantage="step", baseline="batch"),
        advantages=own_rewards,
    ),
    BaselineCase(
        name="trajectories_to_go",
        settings=replace(GROUPED, unit="trajectories", advantage="reward_to_go", baseline="batch", divide_by_std=False),
        advantages=rewards_to_go,
        is_exact=True,
    ),
    BaselineCase(
        name="sequence_mean",
        settings=replace(GROUPED, loss_aggregation="sequence_mean"),
        advantages=constant(in_group),
        weights=per_sequence,
        in_groups=BOTH,
    ),
    BaselineCase(
        name="fixed_length",
        settings=replace(GROUPED, loss_aggregation="fixed_length"),
        advantages=constant(in_group),
        weights=per_fixed_length,
        in_groups=BOTH,
    ),
    BaselineCase(
        name="dr_grpo",
        settings=of_algorithm("dr_grpo"),
        advantages=constant(lambda rollouts: in_group(rollouts, by_std=False)),
        weights=per_fixed_length,
        in_groups=BOTH,
        is_exact=True,
    ),
    BaselineCase(
        name="rloo",
        settings=of_algorithm("rloo"),
        advantages=constant(lambda rollouts: in_group(rollouts, others=True, by_std=False)),
        weights=per_fixed_length,
        in_groups=BOTH,
        is_exact=True,
    ),
    BaselineCase(
        name="reinforce_plus_plus",
        settings=of_algorithm("reinforce_plus_plus"),
        advantages=constant(in_batch),
        in_groups=BOTH,
        is_exact=True,
    ),
    BaselineCase(
        name="gspo",
        settings=of_algorithm("gspo"),
        advantages=constant(in_group),
        weights=per_sequence,
        in_groups=BOTH,
    ),
    BaselineCase(name="cispo", settings=of_algorithm("cispo"), advantages=constant(in_group), in_groups=BOTH),
)


class Sessions:
    """Every rollout of both prompts, as often as it is probable; or every so many of these.

    With all of them, no mean matters that is subtracted from all: the policy gradient is the same. With some it does.
    """

    def __init__(self, seed: int = 0, every: int = 1) -> None:
        self.table = random_table(TEMPERATURE, seed)
        self.rollouts = [
            replace(rollout, uid=f"{prompt}-{number}")
            for prompt in BOTH
            for number, rollout in enumerate(self._of_prompt(prompt, ()))
            if number % every == 0
        ]

    def batch(self, case: BaselineCase) -> Batch:
        """What a trainer gets of them."""
        pool, unit = Pool(Limits()), Unit(case.settings.unit)
        for rollout in self.rollouts:
            is_grouped = rollout.prompt in case.in_groups
            prompt_uid = f"p{rollout.prompt}" if is_grouped else rollout.uid
            size = sum(other.prompt == rollout.prompt for other in self.rollouts) if is_grouped else 1
            pool.ingest.register(Registration(rollout.uid, prompt_uid, "train", size))
            pool.ingest.submit(pack(list(self._steps(rollout, prompt_uid))))
            if unit is not Unit.STEPS:
                pool.ingest.complete(rollout.uid, prompt_uid, rollout.outcome)
        counts = {
            Unit.GROUPS: len(
                {rollout.prompt if rollout.prompt in case.in_groups else rollout.uid for rollout in self.rollouts}
            ),
            Unit.TRAJECTORIES: len(self.rollouts),
            Unit.STEPS: sum(len(rollout.tokens) for rollout in self.rollouts),
        }
        taken = pool.leasing.take(BatchRequest(count=counts[unit], channel="train", unit=unit), "lease", 1e9)
        assert taken is not None
        return batch_of(taken)

    def defined_gradient(self, case: BaselineCase) -> torch.Tensor:
        """From the definitions that the case names."""
        table, worth = self.table.clone().requires_grad_(), torch.zeros(())
        computed = zip(self.rollouts, case.advantages(self.rollouts), case.weights(self.rollouts), strict=True)
        for rollout, advantages, weight in computed:
            for sampled, advantage in zip(rollout.sampled(), advantages, strict=True):
                worth = worth + weight * advantage * logprob(table, TEMPERATURE, sampled)
        return _gradient(table, worth)

    def exact_gradient(self) -> torch.Tensor:
        """Of the sum of both prompts' expected returns."""
        table, worth = self.table.clone().requires_grad_(), torch.zeros(())
        for rollout in {(rollout.prompt, rollout.tokens): rollout for rollout in self.rollouts}.values():
            logprobs = [logprob(table, TEMPERATURE, sampled) for sampled in rollout.sampled()]
            worth = worth + rollout.total * torch.stack(logprobs).sum().exp()
        return _gradient(table, worth)

    def trained_gradient(self, case: BaselineCase, settings: Settings | None = None) -> torch.Tensor:
        """Ours; with other settings than those of the case if they are given."""
        policy, settings = TreePolicy(self.table), settings or case.settings
        rows = choose_rows(self.batch(case), (), settings, _statistics(case.past))
        Learner(policy, None, settings).learn(rows, 0)
        return uphill(policy)

    def _of_prompt(self, prompt: int, before: tuple[int, ...]) -> Iterator[SampledRollout]:
        """Those that begin so, each as often as it is probable."""
        for token in range(ANSWERS):
            tokens = (*before, token)
            if token != END and len(tokens) < STEPS:
                yield from self._of_prompt(prompt, tokens)
                continue
            rewards = tuple(self._reward(prompt, tokens[:end]) for end in range(1, len(tokens) + 1))
            rollout = SampledRollout("", prompt, tokens, rewards, self._reward(prompt, tokens, is_outcome=True))
            times = PARTS ** (STEPS - len(tokens))
            for sampled in rollout.sampled():
                times *= share(self.table, TEMPERATURE, sampled)
            yield from [rollout] * times

    def _reward(self, prompt: int, tokens: tuple[int, ...], *, is_outcome: bool = False) -> float:
        """It depends on what was sampled up to then, and on nothing later."""
        random = np.random.default_rng((prompt, is_outcome, *(token + 1 for token in tokens)))
        return float(random.uniform(high=3.0 if prompt == EASY else 1.0))

    def _steps(self, rollout: SampledRollout, prompt_uid: str) -> Iterator[Step]:
        for place, sampled in enumerate(rollout.sampled()):
            yield Step(
                prompt_ids=ids_array(sampled.prefix),
                response_ids=ids_array([sampled.token]),
                response_logprobs=logprobs_array([logprob(self.table, TEMPERATURE, sampled).item()]),
                trajectory_uid=rollout.uid,
                prompt_uid=prompt_uid,
                uid=f"{rollout.uid}-{place}",
                step_index=place,
                started_at=float(place),
                exactness=Exactness.ENGINE,
                reward=rollout.rewards[place],
                reward_source="task",
                reward_revision=1,
                metadata={"task": str(rollout.prompt)},
                temperature=TEMPERATURE,
            )


def agreement(some: torch.Tensor, defined: torch.Tensor) -> float:
    """1 minus the relative error: unlike a cosine it also notices another length."""
    return 1.0 - float(torch.linalg.vector_norm(some - defined).item() / torch.linalg.vector_norm(defined).item())


def _gradient(table: torch.Tensor, worth: torch.Tensor) -> torch.Tensor:
    worth.backward()  # type: ignore[no-untyped-call]
    assert table.grad is not None
    return table.grad


def _statistics(past: dict[int, list[float]]) -> RunningStatistics:
    statistics = NO_PAST
    for prompt, returns in past.items():
        count = len(returns)
        statistics = statistics.after(
            np.array(returns), np.zeros(count), np.arange(count), [str(prompt)] * count, np.ones(count, np.bool_)
        )
    return statistics
