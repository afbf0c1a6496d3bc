"""All rollouts of a task with three sampled tokens, in a real pool, and the exact gradient of what they are worth.

The first step answers with two tokens, the second with one. In a tree there are three steps with one token each: two
that continue the first one, or one after the other.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from benchmarks.truth_rig.policy import ANSWERS, SampledToken, logprob, random_table, share, state_of
from stepwell.pool.api.leasing import BatchRequest
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.producing import Registration, RewardGiven
from stepwell.pool.client.batch import Batch, batch_of
from stepwell.pool.rules.pool import Pool
from stepwell.steps.advantages import AdvantageKind
from stepwell.steps.columns import pack
from stepwell.steps.credit import CreditKind
from stepwell.steps.step import Exactness, Step, VersionSpan, ids_array, logprobs_array

REPLY = (6, 4)
"""What the environment says between the steps."""
OTHER_REPLY = (4, 6)
"""What it says to a second attempt."""
RETRIED = 0
"""In a tree: the first answer after which the agent goes back to it for its third step."""
FORK, CHAIN = ((0, 1), (0, 2)), ((0, 1, 2),)
"""The ways from the root of a tree to its leaves, as steps."""
OLD, NEW = 0, 1
"""Versions of the weights."""

FAR = "in_flight_far"
"""Weights that change more than in one update: reported, not promised."""
BOTH = (0, 1)
"""Steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    name: str
    advantage: AdvantageKind = "rollout"
    is_forked: bool = False
    """Does the second prompt drop a part of the first answer?"""
    is_tree: bool = False
    """Does the agent go back to its first step after some answers?"""
    credit: CreditKind = "root"
    left_out: int | None = None
    """The step that is marked untrainable."""
    rewarded_steps: tuple[int, ...] = ()
    """The steps that have a reward of their own."""
    is_late: bool = False
    """Are rewards given after the rollout has ended?"""
    weight_change: float = 0.0
    """How much a logit moves, in units of the temperature, between the first token and the second. Token-wise ratios
    do not correct which prefixes the old weights reached, so the gradient is exact up to this much."""


SCENARIOS = (
    Scenario(name="plain"),
    Scenario(name="in_flight", weight_change=0.02),
    Scenario(name=FAR, weight_change=0.1),
    Scenario(name="forks", is_forked=True),
    Scenario(name="left_out", left_out=0),
    Scenario(name="late_rewards", is_late=True, rewarded_steps=BOTH),
    Scenario(name="step_rewards", rewarded_steps=BOTH),
    Scenario(name="step_rewards_of_left_out_steps", rewarded_steps=BOTH, left_out=0),
    Scenario(name="own_step_rewards", rewarded_steps=BOTH, advantage="step"),
    Scenario(name="own_step_rewards_left_out", rewarded_steps=BOTH, advantage="step", left_out=0),
    Scenario(name="rewards_to_go_left_out", rewarded_steps=BOTH, advantage="reward_to_go", left_out=0),
    Scenario(name="rewards_to_go", rewarded_steps=BOTH, advantage="reward_to_go"),
    Scenario(name="first_step_rewarded", rewarded_steps=(0,), advantage="reward_to_go"),
    Scenario(name="rewards_to_go_over_forks", rewarded_steps=BOTH, advantage="reward_to_go", is_forked=True),
    Scenario(name="credit_root", is_tree=True),
    Scenario(name="credit_leaf", is_tree=True, credit="leaf"),
    Scenario(name="credit_split", is_tree=True, credit="split"),
)


@dataclass(frozen=True, slots=True)
class Rollout:
    sampled: tuple[SampledToken, ...]
    prompts: tuple[tuple[int, ...], ...]
    outcome: float
    step_rewards: tuple[float, ...]

    @property
    def total(self) -> float:
        return self.outcome + sum(self.step_rewards)

    def credit(self, kind: CreditKind, step: int) -> float:
        """What a step of a tree counts, by the definition: `leaf` sums over the ways to the leaves that it is on, and
        `split` takes their mean."""
        ways = FORK if self.sampled[0].token == RETRIED else CHAIN
        of_step = sum(step in way for way in ways)
        return {"root": 1.0, "leaf": float(of_step), "split": of_step / len(ways)}[kind]


class Task:
    """All rollouts of a scenario after one prompt, and the weights that write them."""

    def __init__(self, scenario: Scenario, temperature: float, prompt: int = 5, seed: int = 0) -> None:
        self.scenario, self.temperature, self.prompt = scenario, temperature, prompt
        old, new = random_table(temperature, seed), random_table(temperature, seed + 1)
        start = state_of((prompt,))
        noise = torch.randn(ANSWERS, generator=torch.Generator().manual_seed(seed))
        new[start] = old[start] + scenario.weight_change * temperature * noise
        self.tables = [old, new] if scenario.weight_change else [old, old]
        random = np.random.default_rng(seed)
        self._outcomes = random.uniform(size=(ANSWERS,) * 3)
        self._first_rewards = random.uniform(size=(ANSWERS,) * 2)
        self._second_rewards = random.uniform(size=(ANSWERS,) * 3)
        self.rollouts = [self._rollout(*tokens) for tokens in product(range(ANSWERS), repeat=3)]

    @property
    def table(self) -> torch.Tensor:
        """The weights that are trained."""
        return self.tables[NEW]

    def batch(self) -> Batch:
        """What a trainer gets of a pool in which each rollout is as often as it is probable."""
        pool = Pool(Limits())
        prompt_uid = f"p{self.prompt}"
        repeated = [rollout for rollout in self.rollouts for _ in range(self._times(rollout))]
        for number, rollout in enumerate(repeated):
            uid = f"{prompt_uid}-{number}"
            pool.ingest.register(Registration(uid, prompt_uid, "train", len(repeated)))
            pool.ingest.submit(pack(list(self._steps(rollout, uid, prompt_uid))))
            pool.ingest.complete(uid, prompt_uid, None if self.scenario.is_late else rollout.outcome)
            if self.scenario.is_late:
                of_steps = [(place, rollout.step_rewards[place]) for place in self.scenario.rewarded_steps]
                for place, value in (*of_steps, (None, rollout.outcome)):
                    given = RewardGiven(trajectory_uid=uid, prompt_uid=prompt_uid, value=value, step_index=place)
                    assert pool.ingest.reward(given)
        taken = pool.leasing.take(BatchRequest(count=1, channel="train"), "lease", 1e9)
        assert taken is not None
        return batch_of(taken)

    def exact_gradient(self) -> torch.Tensor:
        """Of the expected return with respect to the table, for the tokens of steps that are trained.

        With `advantage="step"`, of the expected outcome and own reward of each step with respect to its own tokens. In
        a tree, of the expected advantage, which each step has as often as the credit says. The credit depends on what
        was sampled, so the mean that is subtracted matters there, and nowhere else.
        """
        table = self.table.clone().requires_grad_()
        worth, mean = torch.zeros(()), self._mean_return() if self.scenario.is_tree else 0.0
        for rollout in self.rollouts:
            for step, own in enumerate(rollout.step_rewards):
                if step == self.scenario.left_out:
                    continue
                counts = rollout.outcome + own if self.scenario.advantage == "step" else rollout.total
                if self.scenario.is_tree:
                    counts = rollout.credit(self.scenario.credit, step) * (counts - mean)
                worth = worth + counts * self._probability(table, rollout, step)
        worth.backward()  # type: ignore[no-untyped-call]
        assert table.grad is not None
        return table.grad

    def _mean_return(self) -> float:
        times = [self._times(rollout) for rollout in self.rollouts]
        return float(np.average([rollout.total for rollout in self.rollouts], weights=times))

    def deviation(self) -> float:
        """The standard deviation of the returns in the batch, by which a group's advantages are divided."""
        returns = np.repeat([rollout.total for rollout in self.rollouts], [self._times(r) for r in self.rollouts])
        return float(returns.std(ddof=1))

    def _probability(self, table: torch.Tensor, rollout: Rollout, step: int) -> torch.Tensor:
        """Of the rollout; with a gradient only for the tokens of that step."""
        total = torch.zeros(())
        for sampled in rollout.sampled:
            value = logprob(table, self.temperature, sampled)
            total = total + (value if sampled.step == step else value.detach())
        return total.exp()

    def _times(self, rollout: Rollout) -> int:
        times = 1
        for sampled in rollout.sampled:
            times *= share(self.tables[sampled.version], self.temperature, sampled)
        return times

    def _tree(self, a: int, b: int, c: int) -> Rollout:
        first, second = (self.prompt,), (self.prompt, a, *REPLY)
        third = (self.prompt, a, *OTHER_REPLY) if a == RETRIED else (*second, b, *REPLY)
        prompts = (first, second, third)
        sampled = tuple(SampledToken(prompts[step], token, step, NEW) for step, token in enumerate((a, b, c)))
        return Rollout(sampled, prompts, float(self._outcomes[a, b, c]), (0.0,) * 3)

    def _rollout(self, a: int, b: int, c: int) -> Rollout:
        if self.scenario.is_tree:
            return self._tree(a, b, c)
        first = (self.prompt,)
        second = (self.prompt, b, *REPLY) if self.scenario.is_forked else (self.prompt, a, b, *REPLY)
        sampled = (
            SampledToken(first, a, 0, OLD),
            SampledToken((*first, a), b, 0, NEW),
            SampledToken(second, c, 1, NEW),
        )
        rewards = (float(self._first_rewards[a, b]), float(self._second_rewards[a, b, c]))
        given = tuple(reward if step in self.scenario.rewarded_steps else 0.0 for step, reward in enumerate(rewards))
        return Rollout(sampled, (first, second), float(self._outcomes[a, b, c]), given)

    def _steps(self, rollout: Rollout, uid: str, prompt_uid: str) -> Iterator[Step]:
        for place, prompt in enumerate(rollout.prompts):
            own = [sampled for sampled in rollout.sampled if sampled.step == place]
            logprobs = [logprob(self.tables[s.version], self.temperature, s).item() for s in own]
            is_given = place in self.scenario.rewarded_steps and not self.scenario.is_late
            yield Step(
                prompt_ids=ids_array(prompt),
                response_ids=ids_array([sampled.token for sampled in own]),
                response_logprobs=logprobs_array(logprobs),
                trajectory_uid=uid,
                prompt_uid=prompt_uid,
                uid=f"{uid}-{place}",
                step_index=place,
                started_at=float(place),
                policy_version=own[0].version,
                version_spans=tuple(VersionSpan(s.version, n, n + 1) for n, s in enumerate(own)),
                exactness=Exactness.ENGINE,
                reward=rollout.step_rewards[place] if is_given else None,
                reward_source="task" if is_given else "",
                reward_revision=int(is_given),
                untrainable="side_call: told to" if place == self.scenario.left_out else None,
                temperature=self.temperature,
            )
