"""The gradient of each algorithm, against the formulas of docs/training.md: they are read from the page and computed in
plain loops, rollout by rollout and token by token, for a policy that is a table. autograd gives their gradient, and
finite differences show that this is theirs."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import torch

from stepwell.pool.client.batch import Batch, make_batch
from stepwell.steps.columns import pack
from stepwell.steps.step import Step, logprobs_array
from stepwell.trainers.algorithms import ALGORITHMS, AlgorithmDefaults, AlgorithmKind
from stepwell.trainers.learner import Learned, Learner
from stepwell.trainers.rows import choose_rows
from stepwell.trainers.settings import Settings
from tests.unit.trainers.models import VOCABULARY, Bigram, one_turn

PAGE = (Path(__file__).parents[3] / "docs" / "training.md").read_text()
SECTION = PAGE.partition("### Algorithms\n")[2].partition("\n### Dynamic sampling")[0]
FIXED_LENGTH = 5
EPSILON = 1e-4
Turn = tuple[list[int], list[int]]


def cells(label: str) -> list[str]:
    """Of the row of the page's tables that begins so."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in SECTION.splitlines() if line.startswith("|")]
    (row,) = [row[1:] for row in rows if row[0] == label]
    return [cell.strip("`") for cell in row]


# -- a batch -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SampledRollout:
    group: int
    turns: list[Turn]
    """What is said to the policy, and what it answers."""
    reward: float
    forgets: bool = False
    """Is each turn a row of its own?"""

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Each sampled token, behind the one before it."""
        for told, answer in self.turns:
            yield from zip([told[-1], *answer], answer, strict=False)

    def steps(self, uid: str, sampled_by: torch.Tensor) -> list[Step]:
        made: list[Step] = []
        context: list[int] = []
        for number, (told, answer) in enumerate(self.turns):
            context = [VOCABULARY - 1 - number, *told] if self.forgets else [*context, *told]
            before = list(zip([context[-1], *answer], answer, strict=False))
            recorded = [sampled_by[pair].item() for pair in before]
            step = one_turn(uid, f"p{self.group}", context, answer, response_logprobs=logprobs_array(recorded))
            is_last = number == len(self.turns) - 1
            made.append(
                replace(step, uid=f"{uid}-{number}", step_index=number, reward=self.reward if is_last else None)
            )
            context = [*context, *answer]
        return made


ROLLOUTS = [
    SampledRollout(0, [([1, 2], [3, 4, 5])], 1.0),
    SampledRollout(0, [([1, 2], [4]), ([6], [7, 8])], 0.0),
    SampledRollout(0, [([1, 2], [5, 5]), ([7], [1]), ([2], [9, 3])], 0.25, forgets=True),
    SampledRollout(1, [([3], [2])], 2.0),
    SampledRollout(1, [([3], [8, 8, 1, 0])], 0.5),
    SampledRollout(1, [([3], [6]), ([5], [4, 2])], 0.0, forgets=True),
    SampledRollout(1, [([3], [7, 9]), ([8], [1, 3, 6])], 1.0),
]


def random_table(seed: int, spread: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64)


TABLE = random_table(0, 0.8)
OLD = TABLE + random_table(1, 0.35)
"""The weights that sampled: some ratios are outside every clip."""


def batch() -> Batch:
    sampled_by = OLD.log_softmax(-1)
    of_rollouts = [rollout.steps(f"t{number}", sampled_by) for number, rollout in enumerate(ROLLOUTS)]
    sizes = [
        sum(len(steps) for steps, rollout in zip(of_rollouts, ROLLOUTS, strict=True) if rollout.group == group)
        for group in (0, 1)
    ]
    return make_batch(pack([step for steps in of_rollouts for step in steps]), sizes)


# -- by the definitions ------------------------------------------------------------------------------------------------


def advantage(rollout: SampledRollout, settings: Settings) -> float:
    compared = [other for other in ROLLOUTS if settings.baseline == "batch" or other.group == rollout.group]
    rewards = [other.reward for other in compared]
    others = [other.reward for other in compared if other is not rollout]
    difference = rollout.reward - fmean(others if settings.baseline == "leave_one_out" else rewards)
    return difference / (stdev(rewards) + EPSILON) if settings.divide_by_std else difference


def weight(rollout: SampledRollout, rollouts: Sequence[SampledRollout], settings: Settings) -> float:
    """Of each of its tokens."""
    length = len(list(rollout.pairs()))
    return {
        "token_mean": 1 / sum(len(list(other.pairs())) for other in rollouts),
        "sequence_mean": 1 / len(rollouts) / length,
        "fixed_length": 1 / len(rollouts) / FIXED_LENGTH,
    }[settings.loss_aggregation]


def clamp(value: Any, low: float, high: float) -> Any:
    return min(max(value, low), high)


def fixed(value: torch.Tensor | float) -> torch.Tensor:
    return torch.as_tensor(value).detach()


def evaluated(formula: str, values: Mapping[str, Any]) -> torch.Tensor:
    functions = {"exp": torch.exp, "mean": torch.mean, "clamp": clamp, "fixed": fixed}
    found = eval(formula, {"__builtins__": {"min": min, "max": max}, **functions}, dict(values))
    return torch.as_tensor(found, dtype=torch.float64)


def defined_loss(
    table: torch.Tensor, proximal: torch.Tensor, rollouts: Sequence[SampledRollout], settings: Settings
) -> torch.Tensor:
    """`proximal` are the weights before the first gradient step."""
    gain, has_cap = cells(f"`{settings.algorithm}`")[0], settings.importance_cap is not None
    bounds = {name: getattr(settings, name) for name in ("clip_low", "clip_high", "dual_clip", "importance_cap")}
    total = torch.zeros((), dtype=torch.float64)
    for rollout in rollouts:
        previous, chosen = torch.tensor(list(rollout.pairs())).T
        logprobs = {
            "log_π": table.log_softmax(-1)[previous, chosen],
            "log_p": proximal.log_softmax(-1)[previous, chosen].detach(),
            "q": OLD.log_softmax(-1)[previous, chosen],
        }
        scope: dict[str, Any] = {
            "ρ": evaluated(cells("ρ")[has_cap], logprobs),
            "s": evaluated(cells("s")[has_cap], logprobs),
        }
        importance = evaluated(cells("ω of `gspo`" if settings.algorithm == "gspo" else "ω")[1], logprobs)
        for number in range(len(chosen)):
            of_token = {name: values[number] if values.ndim else values for name, values in scope.items()}
            of_token |= {"A": advantage(rollout, settings), "log_π": logprobs["log_π"][number]}
            ratio = {"ω": importance[number] if importance.ndim else importance}
            counts = evaluated(cells(f"w, `{settings.importance_sampling}`")[has_cap], bounds | ratio)
            gained = counts * evaluated(gain, bounds | of_token)
            total = total - weight(rollout, rollouts, settings) * gained
    return total


def defined_gradient(
    table: torch.Tensor, settings: Settings, rollouts: Sequence[SampledRollout] = ROLLOUTS, proximal: Any = None
) -> torch.Tensor:
    moved = table.double().clone().requires_grad_()
    loss = defined_loss(moved, (table if proximal is None else proximal).double(), rollouts, settings)
    loss.backward()  # type: ignore[no-untyped-call]
    assert moved.grad is not None
    return moved.grad


# -- what the trainer does ---------------------------------------------------------------------------------------------


def settings_of(algorithm: AlgorithmKind, **others: Any) -> Settings:
    return Settings(algorithm=algorithm, max_gradient_norm=1e9, fixed_length=FIXED_LENGTH, **others)


def trained(settings: Settings) -> tuple[Learned, list[tuple[torch.Tensor, torch.Tensor]]]:
    """The weights before each gradient step, and its gradient."""
    model, steps = Bigram(), []
    model.table.weight.data = TABLE.float()
    learner = Learner(model, None, settings)

    def record(*_: object) -> None:
        assert model.table.weight.grad is not None
        steps.append((model.table.weight.detach().clone(), model.table.weight.grad.clone()))

    learner.optimizer.register_step_pre_hook(record)
    return learner.learn(choose_rows(batch(), (), settings), 0), steps


def assert_same(gradient: torch.Tensor, defined: torch.Tensor) -> None:
    torch.testing.assert_close(gradient.double(), defined, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("per_pass", [16_384, 1], ids=["one pass", "a pass per row"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_gradient_is_that_of_the_documented_formula(algorithm: AlgorithmKind, per_pass: int) -> None:
    settings = settings_of(algorithm, tokens_per_pass=per_pass)
    learned, [(_, gradient)] = trained(settings)
    assert 0 < learned.outside_clip < 1 or algorithm in ("gspo", "cispo")
    assert_same(gradient, defined_gradient(TABLE, settings))


@pytest.mark.parametrize("kind", ["truncated", "masked"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_gradient_with_importance_weights_is_that_of_the_documented_formula(
    algorithm: AlgorithmKind, kind: Any
) -> None:
    settings = settings_of(algorithm, importance_cap=1.05, importance_sampling=kind)
    learned, [(_, gradient)] = trained(settings)
    assert 0 < learned.clipped < 1
    assert_same(gradient, defined_gradient(TABLE, settings))


@pytest.mark.parametrize("cap", [None, 1.5], ids=["to the sampled", "to the proximal policy"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_minibatches_are_steps_from_the_weights_before_them(algorithm: AlgorithmKind, cap: float | None) -> None:
    others: dict[str, Any] = {"clip_low": 0.05, "clip_high": 0.05} if algorithm == "gspo" else {}
    settings = settings_of(
        algorithm, importance_cap=cap, minibatches=3, learning_rate=0.05, tokens_per_pass=8, **others
    )
    _, steps = trained(settings)
    assert len(steps) == 3
    for first, (weights, gradient) in enumerate(steps):
        assert_same(gradient, defined_gradient(weights, settings, ROLLOUTS[first::3], proximal=TABLE))
    assert not torch.equal(steps[0][0], steps[2][0])


def test_there_are_no_more_minibatches_than_rollouts() -> None:
    assert len(trained(settings_of("grpo", minibatches=100))[1]) == len(ROLLOUTS)


def test_means_over_minibatches_are_means_over_the_tokens_of_the_batch() -> None:
    whole, parts = (trained(settings_of("grpo", minibatches=count, learning_rate=0.0))[0] for count in (1, 3))
    for name in ("ratio", "clipped", "outside_clip", "rollout_kl", "entropy"):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name), rel=1e-5), name


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name not in ("rloo", "cispo")])
def test_the_gradient_of_a_formula_is_that_of_finite_differences(algorithm: AlgorithmKind) -> None:
    """Those without factors that have no gradient."""
    settings, small = settings_of(algorithm), 1e-6
    gradient = defined_gradient(TABLE, settings)
    largest = gradient.abs().ravel().topk(6).indices.tolist()
    for place in largest:
        moved = torch.zeros_like(TABLE)
        moved.view(-1)[place] = small
        up, down = (defined_loss(TABLE + sign * moved, TABLE, ROLLOUTS, settings).item() for sign in (1, -1))
        assert (up - down) / (2 * small) == pytest.approx(gradient.view(-1)[place].item(), rel=1e-4)


def test_the_gradient_of_another_algorithm_is_noticed() -> None:
    gradients = {name: trained(settings_of(name))[1][0][1] for name in ALGORITHMS}
    for name, gradient in gradients.items():
        for other in gradients.keys() - {name}:
            difference = (gradient - gradients[other]).norm() / gradient.norm()
            assert difference > 0.05, (name, other)


# -- the page ----------------------------------------------------------------------------------------------------------


def test_the_page_lists_every_algorithm_with_its_values() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", SECTION.partition("| `algorithm` |")[2].partition("\n\n")[0], re.M)
    assert listed == list(ALGORITHMS)
    heads = [head for cell in cells("`algorithm`")[1:] for head in re.findall(r"\w+", cell)]
    assert heads == [decided.name for decided in fields(AlgorithmDefaults)]
    for name, algorithm in ALGORITHMS.items():
        shown = [value for cell in cells(f"`{name}`")[1:] for value in cell.split(", ")]
        values = [getattr(algorithm.defaults, head) for head in heads]
        assert shown == ["none" if value is None else str(value) for value in values], name
